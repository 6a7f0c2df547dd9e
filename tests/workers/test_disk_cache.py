"""Digests of weights: remembered while the file is the same, and never longer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from workers import disk_cache
from workers.disk_cache import content_digest


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disk_cache, "_SETTLED_SECONDS", -1.0)  # the files of a test are new
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 1000)
    return path


def test_a_file_is_read_once(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content_digest(weights, tmp_path / "cache")
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert content_digest(weights, tmp_path / "cache") == first


def test_another_content_of_the_same_size_and_time_is_seen(weights: Path, tmp_path: Path) -> None:
    before = weights.stat()
    found = {content_digest(weights, tmp_path / "cache")}
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock may be coarse
        weights.write_bytes(b"b" * 1000)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    found.add(content_digest(weights, tmp_path / "cache"))
    other = tmp_path / "other"
    other.write_bytes(b"c" * 1000)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(weights)
    found.add(content_digest(weights, tmp_path / "cache"))
    assert len(found) == 3


def test_a_file_that_has_just_changed_is_not_remembered(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_SETTLED_SECONDS", 3600.0)
    content_digest(weights, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.json"))


@pytest.mark.parametrize("damage", ["", "[]", '{"same": 1}'])
def test_a_damaged_memory_is_made_again(weights: Path, tmp_path: Path, damage: str) -> None:
    first = content_digest(weights, tmp_path / "cache")
    (remembered,) = tmp_path.glob("cache/digests/*.json")
    remembered.write_text(damage)
    assert content_digest(weights, tmp_path / "cache") == first == content_digest(weights)
    assert remembered.read_text() != damage


def test_a_cache_that_cannot_be_written_costs_only_time(weights: Path, tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.write_text("")
    assert content_digest(weights, cache) == content_digest(weights)
