"""docs/METRICS.md lists the metrics that there are."""

from __future__ import annotations

from tests.harness.reference import DOCUMENT, written


def test_the_tables_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text.count("\n| `rankmill_") > 35
    assert written(text) == text, "python -m tests.harness.reference writes them anew"
