"""The cache folder: who may write to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmill.jobs.cache import make_folder, strangers, write_json

MINE, OTHER = os.getegid(), 54321

STRANGERS = {
    "mine": (0o755, MINE, None),
    "my group's, as a pod's": (0o2775, MINE, None),
    "everybody's": (0o777, MINE, "can be written by everybody"),
    "everybody's, as /tmp is": (0o1777, MINE, "can be written by everybody"),
    "another group's": (0o775, OTHER, f"can be written by group {OTHER}"),
    "another group's to read": (0o755, OTHER, None),
}


@pytest.mark.parametrize(("mode", "group", "why"), STRANGERS.values(), ids=STRANGERS)
def test_who_may_write(tmp_path: Path, mode: int, group: int, why: str | None) -> None:
    inside = tmp_path / "cache" / "openvino" / "model"
    inside.mkdir(parents=True)
    if group != MINE and os.geteuid():
        pytest.skip("needs the right to give a folder away")
    for folder in (tmp_path / "cache", inside.parent, inside):
        os.chown(folder, -1, group)
        folder.chmod(mode)
        found = strangers(inside, tmp_path / "cache")
        assert (found is None) == (why is None), found
        assert why is None or (found and found.startswith(f"{folder} {why}"))
        folder.chmod(0o755)
    tmp_path.chmod(0o777)  # above the cache
    assert strangers(inside, tmp_path / "cache") is None


@pytest.fixture
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_what_is_made_is_never_everybody_s(tmp_path: Path, careless: None) -> None:
    make_folder(tmp_path / "a" / "b")
    write_json(tmp_path / "c" / "d" / "x.json", {})
    for name in ("a/b", "c/d"):
        assert strangers(tmp_path / name, tmp_path / name[0]) is None
