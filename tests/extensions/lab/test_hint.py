"""The summary says what int8 would gain, and which command says what it would cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankmill.cli.score import describe
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.spec import Precision
from rankmill.score.summary import Summary
from tests.conftest import Server, score_file
from tests.harness.tools import needs_package
from tests.workers.backends.test_backends import EXAMPLES


def described(gain: float | None, *, asked: Precision = "auto", precision: str = "bf16") -> str:
    values: dict[str, Any] = dict.fromkeys(Summary.model_fields, 1)
    values |= {"model": "demo", "row_errors": 0, "resumed_rows": 0, "int8_gain": gain, "precision": precision}
    values["taken"] = {}
    return describe(Summary.model_construct(**values), FileRequest(inputs=("a.csv",)), asked)


@pytest.mark.parametrize("gain", [None, 0.8, 1.29])
def test_a_gain_that_is_too_small_is_not_mentioned(gain: float | None) -> None:
    assert "int8" not in described(gain)


def test_what_is_scored_in_bf16_as_int8_is_not_worth_it_says_so() -> None:
    said = "int8 is not worth it on these workers, so the scores are in bf16"
    assert said in described(None, asked="int8")
    assert said not in described(None, asked="int8", precision="int8-64-bf16")
    assert said not in described(None)


def test_the_hint_is_one_line_with_the_command() -> None:
    (line,) = (each for each in described(1.62).splitlines() if "int8" in each)
    assert line.startswith("int8 would be about 1.6 times as fast here; rankmill check-precision ")


def test_the_gain_comes_from_the_worker(shared_queue: Server, tmp_path: Path) -> None:
    needs_package("openvino")
    source = tmp_path / "some.jsonl"
    source.write_text("\n".join(EXAMPLES.read_text().splitlines()[:5]))
    options = (source, "--model", "demo", "-o", tmp_path / "o.parquet", "--redis", shared_queue.url)
    done = score_file(*options, "--json")
    assert done.code == 0
    assert done.summary["int8_gain"] > 0
    done = score_file(*options, "--json", "--force", "--precision", "fp32")
    assert done.summary["int8_gain"] is None
