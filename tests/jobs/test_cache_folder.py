"""The cache folder: who may write to it, and what stays there."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmill.jobs.cache import (
    cache_folder,
    lock,
    make_folder,
    read_json,
    strangers,
    temporary_folder,
    write_json,
)
from rankmill.jobs.contract.errors import ConfigError
from tests.harness.servers.disks import small_disk

MINE, OTHER = os.getegid(), 54321

STRANGERS = {
    "mine": (0o755, MINE, None),
    "my group's, as a pod's": (0o2775, MINE, None),
    "everybody's": (0o777, MINE, "can be written by everybody"),
    "everybody's, as /tmp is": (0o1777, MINE, "can be written by everybody"),
    "another group's": (0o775, OTHER, f"can be written by group {OTHER}"),
    "another group's to read": (0o755, OTHER, None),
}


def test_a_temporary_folder_of_a_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = "import os, sys, rankmill.jobs.cache as c\nwith c.temporary_folder('up-'): os._exit(9)"
    subprocess.run([sys.executable, "-c", killed], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    (left,) = tmp_path.iterdir()
    (tmp_path / "up-not-ours").mkdir()
    with temporary_folder("up-") as held:
        assert left.exists()  # it is so new that its process may not have locked it yet
        for each in tmp_path.iterdir():
            os.utime(each, (0, 0))
        with temporary_folder("up-") as second:
            assert {*tmp_path.iterdir()} == {held, second, tmp_path / "up-not-ours"}
    assert [*tmp_path.iterdir()] == [tmp_path / "up-not-ours"]


def test_a_folder_beside_files_is_removed_a_day_after_its_process_was_killed(tmp_path: Path) -> None:
    killed = "import os, pathlib, sys, rankmill.jobs.cache as c\n"
    killed += "with c.temporary_folder('.a[1]-', pathlib.Path(sys.argv[1])): os._exit(9)"
    subprocess.run([sys.executable, "-c", killed, tmp_path], check=False)
    (left,) = tmp_path.iterdir()
    os.utime(left, (time.time() - 3600,) * 2)
    with temporary_folder(".a[1]-", tmp_path) as held:
        assert left.exists()  # the lock of another host may not be seen here
        os.utime(left, (0, 0))
        os.utime(held, (0, 0))
        with temporary_folder(".a[1]-", tmp_path) as second:
            assert {*tmp_path.iterdir()} == {held, second}
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_needs_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with temporary_folder("up-", tmp_path) as held:
        os.utime(held, (0, 0))
        with temporary_folder("up-", tmp_path) as second:
            assert {*tmp_path.iterdir()} == {held, second}
    assert not list(tmp_path.iterdir())


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


ABOVE = {
    "mine": (0o755, 0, 0, None),
    "everybody's": (0o777, 0, 0, "can be written by everybody"),
    "everybody's, as /tmp is": (0o1777, 0, 0, None),
    "another group's": (0o775, 0, OTHER, f"can be written by group {OTHER}"),
    "another user's": (0o755, OTHER, 0, f"belongs to user {OTHER}"),
    "another user's, as /tmp is": (0o1777, OTHER, 0, f"belongs to user {OTHER}"),
}


@pytest.mark.parametrize(("mode", "owner", "group", "why"), ABOVE.values(), ids=ABOVE)
def test_who_may_replace_it(tmp_path: Path, mode: int, owner: int, group: int, why: str | None) -> None:
    if os.geteuid() and (owner or group):
        pytest.skip("needs the right to give a folder away")
    above, other = tmp_path / "above", tmp_path / "other"
    inside = above / "cache" / "openvino"
    inside.mkdir(parents=True)
    other.mkdir()
    (other / "link").symlink_to(above / "cache")  # named so, it lies where it lies
    os.chown(above, owner or -1, group or -1)
    above.chmod(mode)
    for cache in (above / "cache", other / "link"):
        for found in (strangers(cache), strangers(cache / "openvino", cache)):
            assert (found is None) == (why is None), found
            assert why is None or (found and found.startswith(f"{above} {why}"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give a folder away")
@pytest.mark.parametrize("whose", ["cache", "cache/openvino", "cache/openvino/model"])
def test_root_trusts_no_other_users_folder(tmp_path: Path, whose: str) -> None:
    inside = tmp_path / "cache" / "openvino" / "model"
    inside.mkdir(parents=True)
    os.chown(tmp_path / whose, OTHER, OTHER)
    found = strangers(inside, tmp_path / "cache")
    assert found
    assert found.startswith(f"{tmp_path / whose} belongs to user {OTHER}")


@pytest.fixture
def careless() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    with pytest.raises(ConfigError, match=r"has no home for .*: set cache_dir"):
        cache_folder("auto")
    assert cache_folder("/data/cache") == Path("/data/cache")


def test_what_is_made_is_never_everybody_s(tmp_path: Path, careless: None) -> None:
    make_folder(tmp_path / "a" / "b")
    locked = lock(tmp_path / "a" / "b" / "lock")
    assert locked
    with locked:
        assert os.fstat(locked.fileno()).st_mode & 0o777 == 0o664
        assert locked.readable()  # NFS asks for this if the lock is shared
    write_json(tmp_path / "c" / "d" / "x.json", {})
    for name in ("a/b", "c/d"):
        assert strangers(tmp_path / name, tmp_path / name[0]) is None


def test_a_file_that_the_cache_has_no_room_for_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8k") as disk:
        write_json(disk / "x.json", {"old": 1})
        with pytest.raises(OSError, match="No space left on device"):
            write_json(disk / "x.json", {"new": "text" * 4096})
        assert [file.name for file in disk.iterdir()] == ["x.json"]
        assert read_json(disk / "x.json") == {"old": 1}
