"""check-precision: what a precision does to the rankings, and that a bad one is refused."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from rankmill.extensions.lab.commands.check_precision import check_precision
from rankmill.workers.backends.auto import backends
from tests.conftest import Server, run_command
from tests.harness.processes import messages_in
from tests.workers.backends.test_backends import EXAMPLES

DEMO = (str(EXAMPLES), "--model", "demo", "--sample", "30")


def run(server: Server, *arguments: str) -> Result:
    found = CliRunner().invoke(check_precision, [*arguments, "--redis", server.url])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_it_tells_how_a_precision_ranks_and_what_that_does_to_ndcg(shared_queue: Server) -> None:
    options = (*DEMO, "--label-column", "relevant", "--json", "--threshold", "0.95")
    found = run(shared_queue, *options, "--precision", "bf16", "--precision", "fp32")
    assert found.exit_code == 0, found.output
    measured: list[dict[str, Any]] = json.loads(found.stdout)
    assert [each["precision"] for each in measured] == ["fp32", "bf16"]
    assert measured[0]["spearman"] == pytest.approx(1)
    assert 0.95 < measured[1]["low"] <= measured[1]["spearman"] <= measured[1]["high"] < 1.0001
    assert (measured[1]["verdict"], measured[1]["rows"]) == ("kept", 30)
    assert measured[1]["top_overlap"] is None  # no query of the example has more than ten passages
    assert all(0.5 < each["ndcg"] <= 1 and each["lost"] == 0 for each in measured)


def test_labels_without_a_value_have_no_ndcg(shared_queue: Server, tmp_path: Path, tiny_model: Path) -> None:
    pairs = {"query": ["q"] * 20, "passage": [f"{n} cats" for n in range(20)]}
    for label in (None, math.nan):
        table = pa.table({**pairs, "label": pa.array([label] * 20, pa.float32())})
        pq.write_table(table, tmp_path / "p.parquet")
        options = (str(tmp_path / "p.parquet"), "--model", str(tiny_model), "--precision", "bf16", "--json")
        found = run(shared_queue, *options, "--label-column", "label", "--report-only")
        assert [each["ndcg"] for each in json.loads(found.stdout)] == [None, None], found.output


def test_labels_of_csv_are_numbers(shared_queue: Server, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "relevant": int(row["relevant"])} for row in rows)
    options = ("--model", "demo", "--sample", "30", "--precision", "fp32", "--label-column", "relevant")
    figures = [
        json.loads(run(shared_queue, str(file), *options, "--json").stdout)[0]["ndcg"]
        for file in (EXAMPLES, tmp_path / "pairs.csv")
    ]
    assert figures[0] == figures[1] > 0.5


def test_a_precision_below_the_threshold_is_refused_in_one_line(
    shared_queue: Server, tmp_path: Path, tiny_model: Path
) -> None:
    passages = [f"{n} cats and the moon" for n in range(100)]  # whose scores lie close together
    pq.write_table(pa.table({"query": ["how far"] * 100, "passage": passages}), tmp_path / "p.parquet")
    options = (str(tmp_path / "p.parquet"), "--model", str(tiny_model), "--precision", "bf16")
    refused = run(shared_queue, *options, "--threshold", "0.99999")
    assert refused.exit_code == 1
    (line,) = messages_in(refused.stderr)
    ranks = r"0\.\d+ \(0\.\d+ to [01]\.\d+\)"
    assert re.match(
        rf"check-precision: bf16 has rank correlation {ranks} with fp32, below 0\.99999: use another", line
    )
    assert "lower --threshold, or give --report-only" in line
    assert "bf16" in refused.stdout
    assert "100 rows of 1 queries" in refused.stdout
    allowed = run(shared_queue, *options, "--threshold", "0.99999", "--report-only")
    assert (allowed.exit_code, allowed.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "fp16"], "precision fp16 is not supported on cpu; use fp32, bf16"),
        (["--precision", "fp8"], "precision: "),
        (["--label-column", "grade"], "no column 'grade' in the input; choose another with --label-column"),
        (["--label-column", "passage"], "column 'passage' holds text, not numbers"),
    ],
)
def test_what_cannot_be_compared_is_said(options: list[str], message: str, shared_queue: Server) -> None:
    found = run(shared_queue, *DEMO, *options)
    assert found.exit_code == 2
    (line,) = messages_in(found.stderr)
    assert line.startswith("check-precision: ")
    assert message in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("query,passage\na,b\nc,d,e\n", "in quotes, or write the pairs as Parquet"),
        ("a,b\nc,d\n", "it has 'a', 'b' (choose with --query-column)"),
    ],
)
def test_no_option_is_advised_that_it_lacks(
    content: str, said: str, shared_queue: Server, tmp_path: Path
) -> None:
    (tmp_path / "pairs.csv").write_text(content)
    found = run(shared_queue, str(tmp_path / "pairs.csv"))
    assert said in found.stderr


def test_pairs_with_one_passage_each_have_no_ranks(shared_queue: Server, tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["a", "b"], "passage": ["c", "d"]}), tmp_path / "p.parquet")
    found = run(shared_queue, str(tmp_path / "p.parquet"), "--model", "demo")
    assert found.exit_code == 2
    assert "no query has two passages with different scores" in found.stderr


def test_check_precision_checks_a_backend_with_its_own_workers(tmp_path: Path, tiny_model: Path) -> None:
    passages = [f"{'the moon ' * n}{word}" for n in range(5) for word in ("cat", "king", "tea", "river")]
    pq.write_table(pa.table({"query": ["how far"] * 20, "passage": passages}), tmp_path / "p.parquet")
    options = ["--model", tiny_model, "--backend", "torch", "--precision", "bf16"]
    more = ["--threshold", "0.5", "--json"]
    done = run_command("rankmill", "check-precision", tmp_path / "p.parquet", *options, *more)
    assert done.code == 0, done.err
    fp32, bf16 = json.loads(done.out)
    assert (fp32["backend"], bf16["backend"], bf16["precision"]) == ("torch", "torch", "bf16")
    assert 0.5 < bf16["spearman"] <= 1.0001


@pytest.mark.slow
def test_with_workers_of_its_own_it_checks_int8() -> None:
    pytest.importorskip("onnxruntime")
    options = ["--backend", "onnx", "--precision", "int8", "--threshold", "0.9", "--json"]
    done = run_command("rankmill", "check-precision", *DEMO, *options)
    assert done.code == 0, done.err
    fp32, int8 = json.loads(done.out)
    here = backends()["onnx"].int8()[0]  # the kind of this CPU
    assert (fp32["backend"], int8["backend"], int8["precision"]) == ("onnx", "onnx", here)
    assert 0.9 < int8["spearman"] < 1
