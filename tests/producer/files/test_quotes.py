"""The quotes of CSV: a stray one is an error that names the line of its field, and no row is lost."""

from __future__ import annotations

import csv
import gzip
import io
import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.corpus.rankings import read_ranking
from rankmill.producer.files.corpus.texts import read_texts
from rankmill.producer.files.formats import quotes
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.formats.quotes import Misquoted, Quotes
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import open_source

ROWS = [f'q{n},"passage {n}, it is"\n' for n in range(1000)]
HEAD = "query,passage\n"


def read(path: Path) -> list[dict[str, object]]:
    source = open_source(find_files([str(path)]), TextColumns("query", "passage"), allow_nulls=True)
    return [row for table in source.tables(Sizing(64)) for row in table.to_pylist()]


def changed(row: int, text: str) -> bytes:
    return "".join([HEAD, *ROWS[:row], text, *ROWS[row + 1 :]]).encode()


BROKEN = {
    "never closed, nothing quoted after it": (
        "".join([HEAD, *ROWS[:500], 'q,"passage\n', *(f"q{n},passage\n" for n in range(500))]).encode(),
        502,
        "is never closed",
    ),
    "cut in its last field": (changed(999, 'q,"passage that goes on'), 1001, "is never closed"),
    "never closed in the header": (b'query,"passage\nq,p\n', 1, "is never closed"),
    "a quote before the next": (changed(7, 'q,"passage\n'), 9, "is behind the closing quote"),
    "a closing quote in a sentence": (changed(7, 'q,"He" said so\n'), 9, "is behind the closing quote"),
    "two fields, both empty but for the second": (changed(7, '"""",""x\n'), 9, "is behind the closing quote"),
    "a passage of many lines before it": (
        changed(7, 'q,"a\n\r\nb\rc"\nq,"x"y\n'),
        13,
        "is behind the closing",
    ),
}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.zst"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_stray_quote_is_named_with_the_line_of_its_field(tmp_path: Path, name: str, what: str) -> None:
    content, line, message = BROKEN[what]
    with pa.output_stream(tmp_path / name, compression="detect") as stream:
        stream.write(content)
    with pytest.raises(InputError, match=re.escape(f"{name}, line {line}: ") + ".*" + message):
        read(tmp_path / name)


def test_the_texts_of_a_run_and_the_run_itself_are_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "corpus.csv"
    path.write_text('id,text\nd1,"one\nd2,two\n')
    with pytest.raises(InputError, match=r"corpus\.csv, line 2: .* is never closed"):
        list(read_texts(path))
    path.write_text('query_id,doc_id\nq,d1\nq,"d2\nq,d3\n')
    with pytest.raises(InputError, match=r"corpus\.csv, line 3: .* is never closed"):
        list(read_ranking(path))


def test_line_ends_and_quotes_inside_fields_stay_as_they_are(tmp_path: Path) -> None:
    passage = 'She said "no",\n\n' * 5000
    rows = [{"query": 'a 5" disk', "passage": passage}, {"query": "", "passage": 'x"'}]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        file.write("query,passage\r\n")
        file.write('a 5" disk,"' + passage.replace('"', '""') + '"\r\n"",x"\r\n')
    assert read(tmp_path / "a.csv") == rows


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_last_field_of_a_file_is_null_whatever_ends_the_file(tmp_path: Path, end: str) -> None:
    """Arrow takes an empty field there for one in quotes if the field before it is in quotes."""
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        file.write(f'query,passage\n"q, r","p"\n"q, r",{end}')
    assert read(path) == [{"query": "q, r", "passage": "p"}, {"query": "q, r", "passage": None}]


def test_a_field_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    passage = "word\n" * 3_000_000
    path.write_text(f'query,passage\nq,"{passage}"\n')
    assert read(path) == [{"query": "q", "passage": passage}]
    path.write_text(f'query,passage\nq,"{passage * 2}"\n')
    with pytest.raises(
        InputError, match=r"line 2: the closing quote of the field .* is missing, or .* longer than 16 MiB"
    ):
        read(path)


text = st.lists(
    st.sampled_from(['"', '""', ",", "\n", "\r", "\r\n", "a", "b c", '"a","b"\n', "é"]), max_size=30
)


@settings(max_examples=1000)
@given(text.map("".join), st.lists(st.integers(1, 4), max_size=20))
@example('"', [])
@example('a"",""', [1])
@example('"a\n",""""""', [3, 1, 1])
def test_what_pythons_strict_mode_reads_is_read_and_nothing_else(content: str, cuts: list[int]) -> None:
    raw = content.encode()
    checked = Quotes(",")
    try:
        expected = list(csv.reader(io.StringIO(content, newline=""), strict=True))
    except csv.Error:
        expected = None
    wrong: Misquoted | None = None
    try:
        at = 0
        for cut in [*cuts, len(raw)]:
            if at < len(raw):
                checked.look(raw[at : at + cut])
            at += cut
        checked.look(b"")
    except Misquoted as error:
        wrong = error
    assert (wrong is None) == (expected is not None)
    if wrong:
        before = raw[: wrong.place]
        assert raw[wrong.place : wrong.place + 1] == b'"'
        assert not before or before[-1:] in {b",", b"\n", b"\r"}
        whole = content[: len(before.decode())]
        list(csv.reader(io.StringIO(whole, newline=""), strict=True))  # what is before the field is well


@settings(max_examples=100)
@given(st.lists(st.tuples(text.map("".join), text.map("".join)), max_size=6), st.booleans())
def test_what_python_writes_is_read(rows: list[tuple[str, str]], all_quoted: bool) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL if all_quoted else csv.QUOTE_MINIMAL)
    writer.writerows([("query", "passage"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv.gz"
        path.write_bytes(gzip.compress(out.getvalue().encode()))
        found = [(row["query"] or "", row["passage"] or "") for row in read(path)]
    assert found == rows


def test_the_line_is_counted_over_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotes, "_PIECE_BYTES", 3)
    path = tmp_path / "a.csv"
    path.write_bytes(b'query,passage\r\nq,p\rq,"p"\n\nq,"')
    with pytest.raises(InputError, match=r"a\.csv, line 5: "):
        read(path)
