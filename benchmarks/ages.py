"""Checks whether the tables of the first screen were measured with recent code.

    python -m benchmarks.ages    # a line for each table that is too old; exit code 1 then

The first screen is README.md and the first section of docs/explanation/benchmarks.md. A clone without
history is not checked.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.comparison.environments import ROOT

CODE = ("rankmill/workers/engine", "rankmill/workers/backends", "rankmill/producer/collect")
"""The folders whose speed the tables show."""

LIMIT = 40
"""Number of commits of `CODE` after which a table is too old, which is about a day's work. Commits that
change only docstrings and comments do not count.

A comparison takes most of an hour of an idle machine, so once a day is as often as anyone measures.
"""


def tables(root: Path = ROOT) -> list[Path]:
    """The tables that the first screen links to."""
    readme = (root / "README.md").read_text()
    explained = (root / "docs" / "explanation" / "benchmarks.md").read_text()
    first = "".join(explained.partition("\n## ")[2].partition("\n## ")[0])
    names = re.findall(r"benchmarks/((?:[\w-]+/)?compare)\.(?:md|svg)\)", readme + first)
    return [root / "docs" / "benchmarks" / f"{name}.json" for name in dict.fromkeys(names)]


def too_old(root: Path = ROOT) -> list[str]:
    """A line for each table that is too old, or whose commit is not in this history."""
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return []
    lines = []
    for path in tables(root):
        commit = json.loads(path.read_text())["asked"]["rankmill"].partition("(")[2].rstrip(")").split(",")[0]
        known = _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
        since = _git(root, "rev-list", f"{commit}..HEAD", "--", *CODE).split() if known else []
        count = sum(_changes_code(root, each) for each in since)
        if not known or count > LIMIT:
            age = f"{count} commits ago" if known else "a commit that is not in this history"
            lines.append(
                f"{path.relative_to(root)} is of {age} in {', '.join(CODE)}; at most {LIMIT} are allowed: "
                "make figures PARTS=compare"
            )
    return lines


def _changes_code(root: Path, commit: str) -> bool:
    """Whether a commit changes more of `CODE` than docstrings and comments."""
    files = _git(root, "diff-tree", "--no-commit-id", "--name-only", "-r", commit, "--", *CODE).split()
    versions = ([_git(root, "show", f"{each}:{file}") for each in (f"{commit}^", commit)] for file in files)
    return any(_code(before) != _code(after) for before, after in versions)


def _code(text: str) -> str:
    """A module without its docstrings and comments."""
    module = ast.parse(text)
    for node in ast.walk(module):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                node.body = [each for each in node.body if not _is_text(each)]
    return ast.dump(module)


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _git(root: Path, *arguments: str) -> str:
    """The output of git; empty if git fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit("\n".join(too_old()) or None)
