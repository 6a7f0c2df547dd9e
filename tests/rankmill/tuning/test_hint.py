"""The summary says what int8 would gain, with a command that tells what it would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankmill.cli.score import describe
from rankmill.producer.files.formats.base import TextColumns
from rankmill.score.request import Request
from rankmill.score.summary import Summary
from tests.conftest import Server, score_file
from tests.harness.tools import needs_package
from tests.workers.backends.test_backends import EXAMPLES


def described(gain: float | None, columns: TextColumns) -> str:
    values: dict[str, Any] = dict.fromkeys(Summary.__dataclass_fields__, 1)
    values |= {"model": "demo", "row_errors": 0, "resumed_rows": 0, "int8_gain": gain}
    request = Request(("my pairs.csv",), None, columns, "score", (), True, False, False, False)
    return describe(Summary(**values), request)


@pytest.mark.parametrize("gain", [None, 0.8, 1.29])
def test_a_gain_that_is_too_small_is_not_mentioned(gain: float | None) -> None:
    assert "int8" not in described(gain, TextColumns("query", "passage"))


def test_the_hint_is_one_line_with_the_command() -> None:
    (line,) = (each for each in described(1.62, TextColumns("q", "passage")).splitlines() if "int8" in each)
    assert line.startswith("int8 would be about 1.6 times as fast here; ")
    command = "rankmill check-precision 'my pairs.csv' --precision int8 --model demo --query-column q"
    assert line.endswith(command)


def test_the_gain_comes_from_the_worker(shared_queue: Server, tmp_path: Path) -> None:
    needs_package("nncf")
    source = tmp_path / "some.jsonl"
    source.write_text("\n".join(EXAMPLES.read_text().splitlines()[:5]))
    options = (source, "--model", "demo", "-o", tmp_path / "o.parquet", "--redis", shared_queue.url)
    done = score_file(*options, "--json")
    assert done.code == 0
    assert done.summary["int8_gain"] > 0
    done = score_file(*options, "--json", "--force", "--precision", "fp32")
    assert done.summary["int8_gain"] is None
