"""The names of `rankmill`: what is documented is there, and type checkers find what a caller gets wrong."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator

import rankmill


def raised(kind: type) -> Iterator[str]:
    """The errors that the docstrings of a class and its methods name."""
    for member in (kind, *(value for name, value in vars(kind).items() if name[0] != "_")):
        _, _, section = (inspect.getdoc(member) or "").partition("\nRaises\n------\n")
        for names in re.findall(r"^(\w+(?:, \w+)*)$", section.partition("\n---")[0], re.M):
            yield from names.split(", ")


def test_every_documented_error_is_imported_from_the_package() -> None:
    classes = [found for name in rankmill.__all__ if inspect.isclass(found := getattr(rankmill, name))]
    named = {name for kind in classes for name in raised(kind)}
    assert {"RunTimeout", "RunFailed", "ConfigError", "RunExpired"} <= named
    assert [
        name for name in sorted(named) if not hasattr(rankmill, name) and not hasattr(builtins, name)
    ] == []


def test_the_package_imports_nothing_before_a_name_is_used() -> None:
    code = "import sys, rankmill; print(sorted(name for name in sys.modules if name.startswith('rankmill')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rankmill']"
