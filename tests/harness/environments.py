"""Virtual environments with a few packages, made of links in a fraction of a second."""

from __future__ import annotations

import re
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def environment_with(directory: Path, *packages: str) -> Path:
    """The Python of a new environment that has these packages and what they require, and no others."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(directory)
    (site,) = directory.glob("lib/python*/site-packages")
    for found in _closure(packages).values():
        tops = {file.parts[0] for file in found.files or () if not file.parts[0].startswith(("..", "__"))}
        for top in tops:
            (site / top).symlink_to(Path(str(found.locate_file(top))))
    return directory / "bin" / "python"


def _closure(packages: tuple[str, ...]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    wanted = list(packages)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name not in found:
            found[name] = distribution(name)
            requirements = map(Requirement, found[name].requires or ())
            wanted += [each.name for each in requirements if not each.marker or each.marker.evaluate()]
    return found
