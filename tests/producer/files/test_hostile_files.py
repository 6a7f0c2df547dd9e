"""Damaged and hostile files: one line that names the file, in bounded memory, and never a traceback."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputChanged, InputError
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import open_source
from tests.conftest import run_command
from tests.harness.tools import slow_but

COLUMNS = TextColumns("query", "passage")
MIB = 1 << 20

_READ = """
import resource, sys
from pathlib import Path
from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.source import open_source
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    source = open_source(find_files([sys.argv[1]]), TextColumns("query", "passage"), allow_nulls=True)
    print(sum(map(len, source.tables(Sizing(1024)))), "rows")
except InputError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
"""


def read_elsewhere(path: Path) -> tuple[str, int]:
    """What comes of reading the file in a process of its own, and the MiB that it took."""
    done = run_command("python", "-c", _READ, path)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    said, _, memory = done.out.strip().rpartition("\n")
    return said, int(memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["fifo.csv"], "fifo.csv is not a regular file"),
        (["fifo.parquet"], "fifo.parquet is not a regular file"),
        (["circle.csv"], "circle.csv: its links lead in a circle"),
        (["in.csv", "-o", "circle.csv"], "circle.csv: cannot be written: Too many levels of symbolic links"),
        (["in.csv", "-o", "circle.csv", "--rows-per-part", "1"], "circle.csv: its links lead in a circle"),
        (["in.csv", "-o", "memory://a/b.csv"], "an output cannot be written to memory://"),
        (["in.csv", "-o", "http://127.0.0.1:9/b.csv"], "an output cannot be written to http://"),
        (["in.csv", "-o", f"{'x' * 240}.csv"], ".errors.jsonl: cannot be written: File name too long"),
        (["f?/in.csv", "-o", "b.csv"], "xff/in.csv: its path is not valid UTF-8; rename the file or"),
        (
            ["f\udcff/in.csv", "-o", "b.csv"],
            r"f\udcff/in.csv' is not valid UTF-8; give the file or the folder",
        ),
    ],
)
def test_what_is_no_file_is_told_in_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    for name in ("fifo.csv", "fifo.parquet"):
        os.mkfifo(tmp_path / name)  # opened as a file is, it would wait for ever
    (tmp_path / "circle.csv").symlink_to("circle.csv")
    (tmp_path / "f\udcff").mkdir()
    for name in ("in.csv", "f\udcff/in.csv"):
        (tmp_path / name).write_text("query,passage\na,b\n")
    done = run_command("score-file", *options, "--redis", "redis://127.0.0.1:1", cwd=tmp_path, timeout=60)
    *usage, line = done.err.strip().splitlines()
    assert (done.code, message in line, "".join(usage)[:6]) in ((2, True, ""), (2, True, "Usage:")), done.err


def repeated(head: bytes, unit: bytes, mebibytes: int, tail: bytes = b"") -> Callable[[pa.NativeFile], None]:
    """Writes `unit` until there are so many MiB."""

    def write(stream: pa.NativeFile) -> None:
        stream.write(head)
        block = unit * (MIB // len(unit))
        for _ in range(mebibytes):
            stream.write(block)
        stream.write(tail)

    return write


def text(content: str | Callable[[], str]) -> Callable[[pa.NativeFile], None]:
    """Writes a text, or one that is made when it is written: nobody waits for it at the import."""
    return lambda stream: stream.write((content if isinstance(content, str) else content()).encode()) and None


def nested(opens: str, depth: int, inside: str, closes: str) -> str:
    return f'{{"query": "q", "passage": "p", "x": {opens * depth}{inside}{closes * depth}}}\n'


ROW = '{"query": "q", "passage": "p"}\n'
HOSTILE: dict[str, tuple[str, Callable[[pa.NativeFile], None], str]] = {
    "lists 200,000 deep": (
        "a.jsonl",
        text(ROW + nested("[", 200_000, "", "]")),
        "line 2: .* deeper than 32",
    ),
    "objects 200,000 deep": (
        "a.jsonl",
        text(nested('{"a":', 200_000, "1", "}")),
        "line 1: .* deeper than 32",
    ),
    "never closed": ("a.jsonl", text(nested("[", 200_000, "", "")), "line 1: .* nested deeper"),
    "3,000 deep with a lone surrogate": (
        "a.jsonl",
        text(nested("[", 3000, '"\\ud800"', "]")),
        "line 1: .* nested deeper",
    ),
    "deep over many lines": (
        "a.jsonl",
        text('{"query": "q", "passage": "p", "x":\n' + ("[" * 30 + "\n") * 7000),
        "line 1: not JSON",
    ),
    "deep after a hidden end of line": (
        "a.jsonl",
        text('{"a": "\r' + "[" * 200_000 + '"}'),
        "no column 'query'",
    ),
    "deep inside of a text": (
        "a.jsonl",
        text(json.dumps({"query": "q", "passage": "[{" * 100_000 + '"\\' * 10}) + "\n"),
        "^1 rows$",
    ),
    "deep, but not too deep": ("a.jsonl", text(nested("[", 31, "1", "]") + ROW), "^2 rows$"),
    "a line of 1 GiB": (
        "a.jsonl.zst",
        repeated(b'{"query": "', b"x", 1024, b'"}'),
        "line 1: longer than 16 MiB; shorten it, or write the file as Parquet",
    ),
    "a line of 1 GiB after others": (
        "a.jsonl.zst",
        repeated(ROW.encode() * 1000 + b'{"query": "', b"x", 1024),
        "line 1001: longer than 16 MiB",
    ),
    "256 MiB of nothing": ("a.jsonl.zst", repeated(b"", b"\n", 256), "is empty"),
    "lists in a line of 2 MiB": (
        "a.jsonl",
        repeated(b'{"query": "q\\ud800", "passage": "p", "x": [', b"[],", 2, b"[]]}"),
        "^1 rows$",
    ),
    "a million keys": (
        "a.jsonl",
        text(lambda: "".join(f'{{"k{n}": 1}}\n' for n in range(500_000))),
        "different keys; at most 10,000",
    ),
    "a million keys in a line": (
        "a.jsonl",
        text(lambda: "{" + ",".join(f'"k{n}":1' for n in range(1_000_000)) + "}"),
        "1,000,000 different keys",
    ),
    "2,000 keys, one in each line": (
        "a.jsonl",
        text("".join(f'{{"query": "q", "passage": "p", "k{n % 2000}": {n}}}\n' for n in range(6000))),
        "^6000 rows$",
    ),
    "many keys, then 20,000 lines without any": (
        "a.jsonl",
        text(lambda: ROW + json.dumps({str(key): 1 for key in range(4000)}) + "\n" + "{}\n" * 20_000),
        "^20002 rows$",
    ),
    "an integer of 5,000 digits": (
        "a.jsonl",
        text(nested("", 0, "9" * 5000, "")),
        "line 1: Exceeds the limit",
    ),
    "an integer of 20 digits": (
        "a.jsonl",
        text(ROW + nested("", 0, "12345678901234567890", "")),
        "^2 rows$",
    ),
    "a header of 1 GiB": (
        "a.csv.zst",
        repeated(b"query,passage,", b"x", 1024),
        "its first line is too long for a header",
    ),
    "a million columns": (
        "a.csv",
        text("query,passage" + ",x" * 200_000 + "\n"),
        "200,002 columns; at most 10,000",
    ),
    "a quote that is never closed": (
        "a.csv.zst",
        repeated(b'query,passage\nq,p\nq,"', b"x\n", 1024),
        r"a\.csv\.zst, line 3: the closing quote of .* is missing, or .* longer than 16 MiB",
    ),
    "a row of 1 GiB": (
        "a.tsv.zst",
        repeated(b"query\tpassage\nq\t", b"x", 1024),
        "a row is longer than 16 MiB; shorten it",
    ),
}


DEAR = {"lists in a line of 2 MiB", "256 MiB of nothing", "many keys, then 20,000 lines without any"}


@pytest.mark.parametrize("name", slow_but(HOSTILE, *(HOSTILE.keys() - DEAR)))
def test_a_hostile_file_is_one_line_in_bounded_memory(tmp_path: Path, name: str) -> None:
    file, write, message = HOSTILE[name]
    with pa.output_stream(tmp_path / file, compression="detect") as stream:
        write(stream)
    said, memory = read_elsewhere(tmp_path / file)
    with pytest.raises(InputError, match=message):
        raise InputError(said)
    assert "\n" not in said
    assert len(said) < 1000
    assert memory < 800, f"{memory} MiB"


def test_texts_of_parquet_files_that_are_not_utf_8_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.array([b"caf\xe9"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"query": ["q"], "passage": bad}), path)
    said, _ = read_elsewhere(path)
    assert "column 'passage' is not valid UTF-8" in said


def good_files() -> dict[str, bytes]:
    """A small file of each kind."""
    rows = [{"query": f"q{n}", "passage": f'é "{n}", [x]', "n": n / 2, "deep": {"a": [n]}} for n in range(30)]
    table = pa.Table.from_pylist(rows)
    parquet, csv, arrow, stream = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    with pa.ipc.new_file(arrow, table.schema) as file, pa.ipc.new_stream(stream, table.schema) as sent:
        file.write_table(table, max_chunksize=10)
        sent.write_table(table, max_chunksize=10)
    pq.write_table(table, parquet, row_group_size=10)
    pcsv.write_csv(table.drop_columns(["deep"]), csv)
    jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
    tsv = csv.getvalue().replace(b",", b"\t")
    return {
        "a.parquet": parquet.getvalue(),
        "a.arrow": arrow.getvalue(),
        "a.arrows": stream.getvalue(),
        "a.csv": csv.getvalue(),
        "a.tsv": tsv,
        "a.jsonl": jsonl,
        "a.jsonl.gz": gzip.compress(jsonl),
        "a.csv.zst": pa.compress(csv.getvalue(), codec="zstd", asbytes=True),
    }


GOOD = good_files()
damage = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.sampled_from(
            [b"", b"\x00", b"\xff", b'"', b"\n", b"\r", b"[", b"{", b",", b"9" * 20, b"\\ud800", b"e"]
        )
        | st.binary(min_size=1, max_size=8),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150)
@given(name=st.sampled_from(sorted(GOOD)), changes=damage)
@example("a.jsonl", [(59, b"\\ud800", 0)])  # in a key
@example("a.jsonl", [(200, b"\\ud800", 0)])
def test_whatever_is_damaged_in_a_file_it_is_read_or_refused(
    name: str, changes: list[tuple[int, bytes, int]]
) -> None:
    content = GOOD[name]
    for place, inserted, removed in changes:
        at = place % (len(content) + 1)
        content = content[:at] + inserted + content[at + removed :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        with suppress(InputError, InputChanged):
            source = open_source(find_files([str(path)]), COLUMNS, allow_nulls=True)
            for table in source.tables(Sizing(7)):
                table.validate(full=True)
