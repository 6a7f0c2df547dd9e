"""What ``make release`` makes has the same bytes wherever and whenever it is built, and the same files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness.release import build, check_same, checksums
from tests.harness.tools import tool


@pytest.mark.slow
def test_two_builds_have_the_same_bytes_and_both_packages_the_same_code(tmp_path: Path) -> None:
    tool("git", "git")
    first = build("HEAD", tmp_path / "first")
    check_same(first, build("HEAD", tmp_path / "elsewhere" / "second"))
    (sdist,) = (path for path in first if path.name.endswith(".tar.gz"))
    (wheel,) = (path for path in first if path.suffix == ".whl")
    with tarfile.open(sdist) as files:
        assert {member.uname for member in files.getmembers()} == {""}
        files.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path / 'again')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (again,) = (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        names = [name for name in one.namelist() if name.startswith("rankmill/")]
        assert len(names) > 300
        assert [name for name in names if one.read(name) != other.read(name)] == []
        assert {*other.namelist()} == {*one.namelist()}
    (tmp_path / "first" / "SHA256SUMS").write_text(checksums(first))
    subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "first", check=True, capture_output=True
    )


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.whl").write_text(name)
    with pytest.raises(SystemExit, match=r"a\.whl"):
        check_same([tmp_path / "one" / "a.whl"], [tmp_path / "other" / "a.whl"])
