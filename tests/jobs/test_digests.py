"""Digests of files: remembered while the file is the same, and never longer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from rankmill.jobs import cache as caches
from rankmill.jobs.cache import file_digest
from rankmill.jobs.model_files import model_content, model_facts, model_files


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(caches, "_SETTLED_SECONDS", -1.0)  # the files of a test are new
    monkeypatch.setattr(caches, "_SMALL", 0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * 1000)
    return path


def test_a_file_is_read_once(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file_digest(weights, tmp_path / "cache")
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert file_digest(weights, tmp_path / "cache") == first


def test_another_content_of_the_same_size_and_time_is_seen(weights: Path, tmp_path: Path) -> None:
    before = weights.stat()
    found = {file_digest(weights, tmp_path / "cache")}
    while weights.stat().st_ctime_ns == before.st_ctime_ns:  # the file system's clock may be coarse
        weights.write_bytes(b"b" * 1000)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    found.add(file_digest(weights, tmp_path / "cache"))
    other = tmp_path / "other"
    other.write_bytes(b"c" * 1000)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(weights)
    found.add(file_digest(weights, tmp_path / "cache"))
    assert len(found) == 3


def test_a_file_that_has_just_changed_is_not_remembered(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_SETTLED_SECONDS", 3600.0)
    file_digest(weights, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/**/*.json"))


@pytest.mark.parametrize("damage", ["", "[]", '{"same": 1}'])
def test_a_damaged_memory_is_made_again(weights: Path, tmp_path: Path, damage: str) -> None:
    first = file_digest(weights, tmp_path / "cache")
    (remembered,) = tmp_path.glob("cache/digests/*.json")
    remembered.write_text(damage)
    assert file_digest(weights, tmp_path / "cache") == first == file_digest(weights)
    assert remembered.read_text() != damage


def test_a_cache_that_cannot_be_written_costs_only_time(weights: Path, tmp_path: Path) -> None:
    cache = tmp_path / "file"
    cache.write_text("")
    assert file_digest(weights, cache) == file_digest(weights)


@pytest.mark.parametrize("folder", ["cache", "cache/digests"])
def test_what_strangers_may_have_written_is_not_believed(weights: Path, tmp_path: Path, folder: str) -> None:
    first = file_digest(weights, tmp_path / "cache")
    (remembered,) = tmp_path.glob("cache/digests/*.json")
    remembered.write_text(remembered.read_text().replace(first, "0" * 64))
    assert file_digest(weights, tmp_path / "cache") == "0" * 64
    (tmp_path / folder).chmod(0o777)
    assert file_digest(weights, tmp_path / "cache") == first


FILES = {
    "config.json": True, "model.safetensors": True, "vocab.txt": True, "spm.model": True,
    "chat_template.jinja": True, "1_Pooling/config.json": True, "onnx/model.onnx": True,
    "onnx/weights.bin": True, "rankmill_quantization.json": True, "README.md": False, "LICENSE": False,
    "pytorch_model.bin": False, "optimizer.pt": False, ".git/index": False, "checkpoint-5/config.json": False,
}  # fmt: skip
"""Files of a model's directory, and whether its scores may depend on them."""


@pytest.mark.parametrize("name", FILES)
def test_the_content_of_a_model_is_all_that_its_scores_depend_on(tmp_path: Path, name: str) -> None:
    for each in FILES:
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text("a")
    (tmp_path / "nowhere.json").symlink_to("gone")
    (tmp_path / "circle").symlink_to(tmp_path)
    assert set(model_files(tmp_path)) == {each for each, counts in FILES.items() if counts}
    content, facts = model_content(tmp_path), model_facts(tmp_path)
    (tmp_path / name).write_text("b")
    assert (model_content(tmp_path) != content, model_facts(tmp_path) != facts) == (FILES[name], FILES[name])
    (tmp_path / name).write_text("a")
    assert model_content(tmp_path) == content
    (tmp_path / name).rename((tmp_path / name).with_name("other.json"))
    assert (model_content(tmp_path) != content) == (not name.startswith((".git", "checkpoint")))
