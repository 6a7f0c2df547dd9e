"""score-file reading a pipe, and writing to one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shlex
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill.cli.standard_output import in_temporary_folder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from tests.conftest import BIN, ENVIRON, Outcome, Server
from tests.harness.preloaded import PreloadedProcess

ROWS = [{"query": "q", "passage": f"passage {n}", "n": n} for n in range(40)]


def pipe(data: bytes, *arguments: object) -> Outcome:
    code, out, err = piped(data, "-", *arguments)
    return Outcome(code, out.decode(), err)


def piped(data: bytes, *arguments: object) -> tuple[int, bytes, str]:
    """Its exit code, standard output and standard error."""
    process: PreloadedProcess[bytes] = PreloadedProcess(
        ["score-file", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRON,
    )
    out, err = process.communicate(data, timeout=120)
    assert b"Traceback" not in err, err
    return process.returncode, out, err.decode()


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


def test_of_an_error_s_notes_only_that_on_kept_scores_is_replaced() -> None:
    """The folder of those scores is deleted, whatever the error is."""
    request = FileRequest(inputs=("a.csv",), output="-", output_format="jsonl")
    error = OSError("the disk is full")
    error.add_note("leave --redis out")

    def fail() -> None:
        with in_temporary_folder(request) as named:
            error.add_note(f"7 scored rows are kept in {named.output}.rankmill: the same command continues")
            raise error

    with pytest.raises(OSError, match="full"):
        fail()
    hint, note = error.__notes__
    assert hint == "leave --redis out"
    assert note.startswith("-o - keeps no scores")


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
        ([], "this output has no default: name it with -o"),
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


@pytest.fixture
def common(
    tmp_path: Path, shared_queue: Server, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """Options of a command that runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENVIRON, "TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return ["--redis", shared_queue.url, "--model", tiny_model, "--precision", "fp32", "-o", "-"]


def as_rows(data: bytes, kind: str) -> list[dict[str, object]]:
    """The rows of an output, without their types."""
    if kind == "parquet":
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    elif kind == "jsonl":
        rows = [json.loads(line) for line in data.splitlines()]
    else:
        rows = list(csv.DictReader(io.StringIO(data.decode()), delimiter="\t" if kind == "tsv" else ","))
    return [
        {name: str(row[name]) for name in ("query", "passage", "n")} for row in rows if float(row["score"])
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_the_output_goes_to_standard_output_in_the_formats_of_the_input(
    tmp_path: Path, common: list[object], kind: str
) -> None:
    """And nothing else does; nor does anything stay on the disk."""
    text = FORMATS["semicolons"]
    by_kind = {"csv": text.replace(b";", b","), "tsv": text.replace(b";", b"\t"), "parquet": as_parquet()}
    content = by_kind.get(kind, LINES)
    (tmp_path / f"pairs.{kind}").write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = piped(b"", f"pairs.{kind}", *common)
    assert (code, "40 of 40 rows scored" in err, "scores are on standard output" in err) == (0, True, True), (
        err
    )
    expected = [{name: str(value) for name, value in row.items()} for row in ROWS]
    assert as_rows(out, kind) == expected
    code, out, err = piped(content, "-", *common, "--output-format", "jsonl", "--json")
    assert (code, as_rows(out, "jsonl"), json.loads(err.splitlines()[-1])["output"]) == (0, expected, "-")
    assert sorted(tmp_path.rglob("*")) == before


def test_row_errors_of_standard_output_are_on_standard_error(tmp_path: Path, common: list[object]) -> None:
    (tmp_path / "a.jsonl").write_text('{"query": "q", "passage": "p"}\n{"query": "q", "passage": null}\n')
    code, out, err = piped(b"", "a.jsonl", *common)
    assert code == 3
    assert [json.loads(line)["score"] is None for line in out.splitlines()] == [False, True]
    assert "row 1 (counted from 0) has no score: " in err
    assert "1 row has no score" in err
    code, out, err = piped(b"", "a.jsonl", *common, "-q")
    assert (code, len(out.splitlines()), err) == (3, 2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-"], "-o - needs a format: --output-format jsonl"),
        (["a.jsonl", "b.csv"], "-o - needs a format: --output-format jsonl"),
        (["a.jsonl", "--rows-per-part", "5"], "--rows-per-part has no effect with -o -"),
        (["a.jsonl", "--restart"], "--restart has no effect with -o -"),
        (["none.jsonl"], "none.jsonl: no such file"),
    ],
)
def test_what_standard_output_cannot_be(
    tmp_path: Path, common: list[object], arguments: list[str], message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.csv").write_text("query,passage\nq,p\n")
    code, out, err = piped(LINES, *arguments, *common)
    assert (code, out, message in err) == (2, b"", True), err


def test_standard_output_gets_nothing_of_a_run_that_fails(tmp_path: Path, common: list[object]) -> None:
    lines = [json.dumps({"query": "q", "passage": f"passage {n}"}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"query": "q", "passage": 5}']))
    code, out, err = piped(b"", "a.jsonl", *common)
    assert (code, out, "line 301: column 'passage' holds '5', not text" in err) == (2, b"", True), err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("stream", "code", "message"),
    [
        (">&-", 2, "-o -: standard output is closed; name a file with -o"),
        (">/dev/full", 1, "cannot write to standard output: No space left on device; -o can name a file"),
    ],
)
def test_a_standard_output_that_takes_nothing_is_one_line(
    tmp_path: Path, common: list[object], stream: str, code: int, message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    words = shlex.join(map(str, [f"{BIN}/score-file", tmp_path / "a.jsonl", "-o", "-", *common]))
    done = subprocess.run(
        ["sh", "-c", f"exec {words} {stream}"], env=ENVIRON, capture_output=True, check=False
    )
    assert (done.returncode, message in done.stderr.decode()) == (code, True), done.stderr
    assert b"Traceback" not in done.stderr


def test_a_submitted_run_has_no_standard_output() -> None:
    with pytest.raises(InputError, match=r"a submitted run has no standard output \(-\); name a file"):
        FileRequest(inputs=("a.csv",), output="-").at_home()
