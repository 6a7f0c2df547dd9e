"""Whether the tables of the first screen are of the code that they speak of.

    python -m benchmarks.ages    # a line for each table that is too old; exit code 1 then

The first screen is README.md and the first section of docs/explanation/benchmarks.md. A clone without
history is not checked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.comparison.environments import ROOT

CODE = ("rankmill/workers/engine", "rankmill/workers/backends", "rankmill/producer/collect")
"""The folders whose speed the tables show."""

LIMIT = 40
"""Commits of `CODE` after which a table is too old: about a day's work on it.

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
    """A line for each table that is too old, or of no commit of this history."""
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return []
    lines = []
    for path in tables(root):
        commit = json.loads(path.read_text())["asked"]["rankmill"].partition("(")[2].rstrip(")").split(",")[0]
        commits = _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *CODE)
        if not commits or int(commits) > LIMIT:
            since = f"{commits} commits ago" if commits else "a commit that is not in this history"
            lines.append(
                f"{path.relative_to(root)} is of {since} in {', '.join(CODE)}; at most {LIMIT} are allowed: "
                "make figures PARTS=compare"
            )
    return lines


def _git(root: Path, *arguments: str) -> str:
    """What git says; nothing if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit("\n".join(too_old()) or None)
