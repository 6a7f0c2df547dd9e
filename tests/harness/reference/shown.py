"""docs/reference/shown.md: which tests show each row of docs/explanation/guarantees.md.

A test names the rows that it shows in its docstring, each in a line: ``Shows: a worker is slow.``
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_GUARANTEES = _ROOT / "docs" / "explanation" / "guarantees.md"

_INTRO = """\
# What shows each promise

The tests for each row of the tables in [guarantees](../explanation/guarantees.md), which has the promises.
`python -m pytest NAME` runs one. This page is made from the tests' docstrings
(`python -m tests.harness.reference`).

"""


def page() -> str:
    """The page."""
    tests = shown_by()
    parts = [_INTRO, "| what happens | promise | tests |\n| --- | --- | --- |\n"]
    for row, promises in rows().items():
        named = ", ".join(f"`{test}`" for test in tests.get(row, []))
        parts.append(f"| {row} | {', '.join(map(str, promises))} | {named} |\n")
    return "".join(parts)


def promises() -> list[int]:
    """The numbers of the promises."""
    return [int(number) for number in re.findall(r"^(\d+)\. \*\*", _GUARANTEES.read_text(), re.M)]


def rows() -> dict[str, list[int]]:
    """What may happen, and the promises that hold then, in the page's order."""
    text = _GUARANTEES.read_text()
    tables = re.findall(r"^\| what happens \|.*\n\|[ -|]*\n((?:\|.*\n)+)", text, re.M)
    cells = [line.split(" | ") for table in tables for line in table.splitlines()]
    return {row.removeprefix("| "): list(map(int, numbers.split(", "))) for row, numbers, *_ in cells}


def shown_by() -> dict[str, list[str]]:
    """The tests that show each row, as pytest names them."""
    found: dict[str, list[str]] = {}
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for row in re.findall(r"^Shows: (.+)\.$", ast.get_docstring(node) or "", re.M):
                    found.setdefault(row, []).append(f"{path.relative_to(_ROOT)}::{node.name}")
    return found
