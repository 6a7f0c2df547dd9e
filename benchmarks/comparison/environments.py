"""Makes an environment for each script in ``peers/`` that asks for one, as their dependencies conflict."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".bench"


class CannotInstall(Exception):
    """The environment cannot be made; the message is one line."""


def dependencies(script: Path) -> list[str]:
    """Dependencies in the script's first lines (PEP 723); if it has none, it runs in the project's
    environment.
    """
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", script.read_text(encoding="utf-8"), re.M)
    if not block:
        return []
    found: list[str] = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.M))["dependencies"]
    return found


def python_for(script: Path, *, here: bool = False) -> Path:
    """The interpreter to run `script` with; creates its environment if it does not exist.

    With `here`, it is this command's own interpreter, for machines that can fetch nothing.

    Raises
    ------
    CannotInstall
        pip fails.
    """
    wanted = dependencies(script)
    if here or not wanted:
        return Path(sys.executable)
    folder = HOME / script.stem
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists() or ready.read_text() != "\n".join(wanted):
        print(f"making an environment for {script.stem} …", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted])
        ready.write_text("\n".join(wanted))
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise CannotInstall(errors[-1].removeprefix("ERROR: "))
