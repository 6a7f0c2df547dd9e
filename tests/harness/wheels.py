"""rankmill as a wheel, and environments that it is installed into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


_BUILD = "import sys, setuptools.build_meta; setuptools.build_meta.build_wheel(sys.argv[1])"


def build_wheel(place: Path, extensions: Collection[str] | None = None) -> Path:
    """Build the wheel in `place`, from a copy, as a build writes beside its sources.

    It has these `extensions` with their entry points, and by default all.
    """
    copy = place / "copy"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        extension = re.match("rankmill/extensions/([^/]+)/", name)
        if extensions is None or not extension or extension[1] in extensions:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    if extensions is not None:
        project = copy / "pyproject.toml"
        lines = project.read_text().splitlines(keepends=True)
        named = [re.search(r"rankmill\.extensions\.(\w+)", line) for line in lines]
        kept = [line for line, of in zip(lines, named, strict=True) if not of or of[1] in extensions]
        project.write_text("".join(kept))
    run([sys.executable, "-c", _BUILD, place], copy)
    (wheel,) = place.glob("rankmill-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Make an environment with a wheel without its commands, quicker than `new_environment`."""
    python, site = _empty(folder)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    return python


def run(command: Sequence[object], folder: Path) -> str:
    """Run a command in a folder, and return its output; pytest's own variables are not for it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def new_environment(folder: Path, *packages: Path) -> Path:
    """Make an environment with these packages and the libraries of the suite; returns its Python."""
    python, _ = _empty(folder)
    words = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
    pip(sys.executable, "--python", python, *words, *packages)
    return python


def _empty(folder: Path) -> tuple[Path, Path]:
    """An environment with the libraries of the suite: its Python, and the folder for packages."""
    venv.create(folder)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python", site


def pip(python: str | Path, *words: object) -> None:
    """Run pip without what it says; raises `AssertionError` with that if it fails."""
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
