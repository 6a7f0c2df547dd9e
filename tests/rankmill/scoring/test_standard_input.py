"""score-file reading a pipe."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ENVIRON, Outcome, Server
from tests.harness.preloaded import PreloadedProcess

ROWS = [{"query": "q", "passage": f"passage {n}", "n": n} for n in range(40)]


def pipe(data: bytes, *arguments: object) -> Outcome:
    process: PreloadedProcess[bytes] = PreloadedProcess(
        ["score-file", "-", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRON,
    )
    out, err = process.communicate(data, timeout=120)
    assert b"Traceback" not in err, err
    return Outcome(process.returncode, out.decode(), err.decode())


def as_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return bytes(sink.getvalue())


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FORMATS = {
    "jsonl": LINES,
    "jsonl.gz": gzip.compress(LINES),
    "json": json.dumps(ROWS).encode(),
    "parquet": as_parquet(),
    "semicolons": ("query;passage;n\n" + "".join(f"q;passage {n};{n}\n" for n in range(40))).encode(),
    "tsv.zst": pa.compress(
        ("query\tpassage\tn\n" + "".join(f"q\tpassage {n}\t{n}\n" for n in range(40))).encode(),
        "zstd",
        asbytes=True,
    ),
}


def test_standard_input_is_scored_in_any_format(
    tmp_path: Path, shared_queue: Server, tiny_model: Path
) -> None:
    common = ["--redis", shared_queue.url, "--model", tiny_model, "--precision", "fp32"]
    scores = set()
    for name, data in FORMATS.items():
        output = tmp_path / f"{name}.out.parquet"
        done = pipe(data, *common, "-o", output)
        assert done.code == 0, (name, done.err)
        table = pq.read_table(output)
        rows = [{**row, "n": str(row["n"])} for row in ROWS] if name in {"semicolons", "tsv.zst"} else ROWS
        assert table.select(["query", "passage", "n"]).to_pylist() == rows, name
        scores.add(tuple(table["score"].to_pylist()))
        assert not output.with_name(output.name + ".rankmill").exists()
    assert len(scores) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "standard input (-) has no name; name the output with -o"),
        (["more.csv", "-o", "o.parquet"], "standard input (-) must be the only input"),
        (["-o", "o.jsonl"], "standard input (-) is empty: nothing came from the command before it"),
    ],
)
def test_what_standard_input_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = pipe(b"", *arguments)
    assert (done.code, done.complaints) == (2, [f"score-file: {message}"])
