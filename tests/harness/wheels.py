"""rankmill as a wheel, and environments that it is installed into."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(place: Path, *, core: bool = False) -> Path:
    """Build the wheel in `place`, from a copy, as a build writes beside its sources.

    ``core``: without the extensions and their entry points.
    """
    copy = place / "copy"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        if not (core and name.startswith("rankmill/extensions/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    if core:
        project = copy / "pyproject.toml"
        project.write_text(re.sub(r'^.*"?rankmill\.extensions\..*\n', "", project.read_text(), flags=re.M))
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", place, copy)
    (wheel,) = place.glob("rankmill-*.whl")
    return wheel


def new_environment(folder: Path, *packages: Path) -> Path:
    """Make an environment with these packages and the libraries of the suite; returns its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
    pip(sys.executable, "--python", python, *words, *packages)
    return python


def pip(python: str | Path, *words: object) -> None:
    """Run pip without what it says; raises `AssertionError` with that if it fails."""
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
