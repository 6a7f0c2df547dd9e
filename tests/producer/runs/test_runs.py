"""Runs with queries and corpus: every format of them, what is missing, and the corpus' index."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputChanged, InputError, OutputError
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.corpus import index as index_module
from rankmill.producer.files.corpus.index import in_memory, on_disk
from rankmill.producer.files.corpus.ranking_source import RankingSource
from rankmill.producer.files.corpus.rankings import read_qrels, read_ranking
from rankmill.producer.files.corpus.texts import Side, TextFields, read_texts
from rankmill.producer.files.formats import trec
from rankmill.producer.files.inputs import InputFile, RankingFiles, find_files
from rankmill.producer.files.stores.paths import INDEX
from rankmill.producer.files.stores.reading import fingerprint
from tests.harness.servers.disks import resize, small_disk

ROWS = [("1", "a", 1, 9.5), ("1", "b", 2, 8.25), ("2", "a", 1, 7.0), ("2", "d", 2, 6.5)]


def as_run(path: Path, rows: list[tuple[str, str, int, float]] = ROWS) -> Path:
    """`rows` as the kind of run that the name of `path` asks for."""
    named = [dict(zip(("qid", "docid", "rank", "score"), row, strict=True)) for row in rows]
    kind, *_ = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(named), path)
        return path
    text = {
        ".trec": "".join(f"{q} Q0\t{d}  {rank} {score} me\n" for q, d, rank, score in rows),
        ".tsv": "".join(f"{q}\t{d}\t{rank}\t{score}\n" for q, d, rank, score in rows),
        ".txt": "qid docid rank score\r\n" + "".join(f"{q} {d} {r} {s}\r\n" for q, d, r, s in rows),
        ".csv": "qid,docid,rank,score\n" + "".join(f"{q},{d},{r},{s}\n" for q, d, r, s in rows),
        ".jsonl": "".join(json.dumps(row) + "\n" for row in named),
        ".json": json.dumps(named),
    }[kind]
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in read_ranking(path) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "name",
    ["a.trec", "a.trec.gz", "a.tsv", "a.txt", "a.csv", "a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"],
)
def test_every_kind_of_run_is_read(tmp_path: Path, name: str) -> None:
    assert rows_of(as_run(tmp_path / name)) == ROWS


def test_a_trec_run_is_read_as_pytrec_eval_reads_it(tmp_path: Path) -> None:
    path = as_run(tmp_path / "a.trec")
    with path.open() as file:
        expected = pytrec_eval.parse_run(file)
    found: dict[str, dict[str, float]] = {}
    for query, passage, _, score in rows_of(path):
        found.setdefault(query, {})[passage] = score
    assert found == expected


def test_runs_without_rank_or_score_and_with_lists(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("1\ta\n1\tb\n")
    assert rows_of(path) == [("1", "a", None, None), ("1", "b", None, None)]
    path.write_text("1\ta\t3\n")
    assert rows_of(path) == [("1", "a", 3, None)]
    path.write_text("1\ta\t3.5")
    assert rows_of(path) == [("1", "a", None, 3.5)]
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"qid": 1, "docid": [7, 8], "score": [2.5, 1.5]}\n{"qid": 2, "docid": [], "score": []}\n'
    )
    assert rows_of(path) == [("1", "7", None, 2.5), ("1", "8", None, 1.5)]
    lists = {"docid": pa.array([[7, 8]], pa.large_list(pa.int64())), "score": [[2.5, 1.5]]}
    pq.write_table(pa.table({"qid": [1], **lists}), tmp_path / "a.parquet")  # as Polars writes lists
    assert rows_of(tmp_path / "a.parquet") == [("1", "7", None, 2.5), ("1", "8", None, 1.5)]


def test_ids_may_be_uuids(tmp_path: Path) -> None:
    ids = [uuid.UUID(int=number) for number in (1, 2)]
    column = pa.array([each.bytes for each in ids], pa.binary(16)).cast(pa.uuid())
    pq.write_table(pa.table({"qid": column, "docid": column, "label": [0, 1]}), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [(str(each), str(each), None, None) for each in ids]
    assert read_qrels(tmp_path / "a.parquet")["doc_id"].tolist() == [*map(str, ids)]
    pq.write_table(pa.table({"id": column, "text": ["x", "y"]}), tmp_path / "c.parquet")
    assert texts_of(tmp_path / "c.parquet") == {str(ids[0]): "x", str(ids[1]): "y"}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    run, texts = tmp_path / "a.csv", tmp_path / "c.tsv"
    run.write_text("qid,docid,docid,label\n1,a,b,1\n")
    texts.write_text("id\ttext\ttext\n1\ta\tb\n")
    for read in (rows_of, read_qrels):
        with pytest.raises(InputError, match="two columns, which are both named 'docid': rename one"):
            read(run)
    for fields in ((), ("text",)):
        with pytest.raises(InputError, match=r"named 'text'(: |; )rename one"):
            texts_of(texts, texts=fields)


def test_a_header_names_the_fields_of_judgements(tmp_path: Path) -> None:
    path = tmp_path / "qrels.tsv"
    for text in (
        "qid\trelevance\tdocid\n1\t3\t77\n",
        "qid\titer\tdocid\trel\n1\t0\t77\t3\n",
        "query-id\tcorpus-id\tscore\n1\t77\t3\n",
        "qid\tpassage\tgrade\n1\t77\t3\n",
        "1 0 77 3\n",
    ):
        path.write_text(text)
        assert read_qrels(path).to_dict("records") == [{"query_id": "1", "doc_id": "77", "relevance": 3}]


_ids = st.text(
    st.characters(min_codepoint=33, max_codepoint=1000, exclude_categories=["Z", "C"]), min_size=1, max_size=5
)
_runs = st.lists(
    st.tuples(_ids, _ids, st.integers(0, 999), st.floats(-1e6, 1e6, allow_nan=False)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(_runs, st.sampled_from(["\t", " ", "  ", " \t"]), st.booleans())
def test_trec_runs_of_any_spacing(rows: list[tuple[Any, ...]], space: str, ends: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.trec"
        lines = [space.join([q, "Q0", d, str(rank), repr(score), "tag"]) for q, d, rank, score in rows]
        path.write_text("\n".join(lines) + ("\n" if ends else ""), encoding="utf-8")
        if rows[0][0].lower() in {"qid", "query_id"}:
            return
        assert rows_of(path) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 Q0 a 1 2.5 t\n2 Q0 b 1 2.5\n", "line 2: 5 fields, not 6 as in line 1"),
        ("1 Q0 a 1 2.5 t\n2 Q0 b x 2.5 t\n", "line 2: rank is 'x', not a whole number"),
        ("1 Q0 a 1 2.5 t\n\n2 Q0 b 1 y t\n", "line 3: score is 'y', not a number"),
        ("1 Q0 a 1.0 2.5 t\n", "line 1: rank is '1.0', not a whole number"),
        ("1 Q0 a 1 2.5 t\n2 Q0 caf\xe9 1 2 t\n", "line 2: not valid UTF-8; convert the file first"),
        ("one\n", "line 1: 1 fields; a run has two"),
        ("qid other\n1 2\n", "no column passage_id or pid or doc_id"),
        ("", "a.trec has 0 bytes"),
        ("\n \n", "a.trec: is empty"),
    ],
)
def test_damaged_runs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.trec").write_bytes(text.encode("latin1"))
    with pytest.raises(InputError, match=message):
        rows_of(tmp_path / "a.trec")


def texts_of(path: Path, side: Side = "corpus", **named: Any) -> dict[str, str]:
    parts = read_texts(path, TextFields(side, **named))
    return {
        key: text
        for ids, texts in parts
        for key, text in zip(ids.to_pylist(), texts.to_pylist(), strict=True)
    }


TEXTS = {"1": "One. first", "2": "second", "3": None}


def test_texts_in_every_format(tmp_path: Path) -> None:
    beir: list[dict[str, Any]] = [
        {"_id": "1", "title": "One.", "text": "first"},
        {"_id": "2", "title": "", "text": "second"},
        {"_id": "3", "text": None},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in beir)
    (tmp_path / "a.jsonl").write_text(lines)
    numbers = "".join(json.dumps({**row, "_id": int(str(row["_id"]))}) + "\n" for row in beir)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(numbers.encode()))
    (tmp_path / "c.json").write_text(json.dumps(beir, indent=1))
    pq.write_table(pa.Table.from_pylist(beir).append_column("more", pa.nulls(3)), tmp_path / "d.parquet")
    (tmp_path / "e.tsv").write_text("1\tOne. first\n2\tsecond\n3\t\n")
    (tmp_path / "f.tsv").write_text("id\ttext\ttitle\n1\tfirst\tOne.\n2\tsecond\t\n3\t\t\n")
    (tmp_path / "g.csv").write_text('id,text\n1,"One. first"\n2,second\n3,\n')
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet", "e.tsv", "f.tsv", "g.csv"):
        assert texts_of(tmp_path / name) == TEXTS, name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "1\ta\tb\n", "3 columns and no header; .* or --columns names them"),
        ("a.tsv", "", "a.tsv has 0 bytes"),
        (
            "a.jsonl",
            '{"id": 1, "words": "x"}\n',
            r"which of its columns \('id', 'words'\) is the text of the",
        ),
        ("a.jsonl", "noise\n", "line 1: not JSON"),
        ("a.jsonl", '{"id": "1", "text": "caf\udce9"}\n', "line 1: .*not valid UTF-8"),
        ("a.csv", "id,text\n1,a\n2,b,c\n", "in quotes, or write the texts as Parquet$"),
        (
            "a.jsonl",
            '{"id": "1", "text": "x"}\n{"id": null, "text": "y"}\n',
            r"row 1 \(counted from 0\) has no id",
        ),
    ],
)
def test_damaged_texts(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=message):
        texts_of(tmp_path / name)


@pytest.mark.parametrize("column", ["id", "text"])
def test_columns_that_are_not_text_are_named(tmp_path: Path, column: str) -> None:
    path = tmp_path / "a.parquet"
    options = pc.CastOptions(pa.string(), allow_invalid_utf8=True)
    for values in (pa.array([["a"], ["b"]]), pc.cast(pa.array([b"a", b"\xff"]), options=options)):
        pq.write_table(pa.table({"id": ["1", "2"], "text": ["x", "y"], column: values}), path)
        with pytest.raises(
            InputError, match=rf"column '{column}' \(.*\) is not text, or .* the rows 0 to 1 "
        ):
            texts_of(path)


MS_MARCO_DOCS = (
    "D1555982\thttps://a.example/\tThe hot glowing surfaces\tScience & Mathematics\n"
    'D301595\thttps://b.example/\t\tonly "a" body\n'
)
DPR = (
    'id\ttext\ttitle\n1\t"Aaron ( or ; ""Ahärôn"") is a prophet,\tand more"\tAaron\n'
    '2\t"God at Sinai granted Aaron"\t"""Weird Al"" Yankovic"\n3\t"The \nend"\tAaron\n'
)


def test_corpora_of_the_field_are_read_as_they_come(tmp_path: Path) -> None:
    """MS MARCO's documents have no header; DPR's passages are TSV with the quotes of CSV."""
    path = tmp_path / "msmarco-docs.tsv"
    path.write_text(MS_MARCO_DOCS)
    columns = ("docid", "url", "title", "body")
    expected = {"D1555982": "The hot glowing surfaces Science & Mathematics", "D301595": 'only "a" body'}
    assert texts_of(path, columns=columns) == expected
    assert texts_of(path, columns=columns, texts=("url",))["D301595"] == "https://b.example/"
    path = tmp_path / "psgs_w100.tsv"
    path.write_text(DPR)
    assert texts_of(path) == {
        "1": 'Aaron Aaron ( or ; "Ahärôn") is a prophet,\tand more',
        "2": '"Weird Al" Yankovic God at Sinai granted Aaron',
        "3": "Aaron The \nend",
    }


def test_quotes_of_tsv_that_are_no_csv_stay(tmp_path: Path) -> None:
    for text in ('1\t"to be"\n2\tor "not" to be\n', '1\t"to be"\n', '1\t"a" or ""b""\n2\t"c"\n'):
        (tmp_path / "a.tsv").write_text(text)
        expected = dict(line.split("\t") for line in text.splitlines())
        assert texts_of(tmp_path / "a.tsv") == expected


def test_an_index_knows_the_columns_that_were_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("d1\tone\ttwo\n")
    marks = [fingerprint(tmp_path / "a.tsv")]
    for columns, expected in ((("id", "text", "more"), "one"), (("id", "more", "text"), "two")):
        index = on_disk([tmp_path / "a.tsv"], marks, fields=TextFields("corpus", columns=columns))
        assert index.take(index.find(pa.array(["d1"]))).to_pylist() == [expected]


NAMED: dict[str, dict[str, Any]] = {
    "segment": {"docid": "1", "url": "u", "title": "T", "headings": "H", "segment": "x"},
    "content": {"id": "1", "title": "T", "content": "x"},
    "abstract": {"_id": "1", "title": "T", "abstract": "x"},
    "passage_text": {"doc_id": 1, "title": "T", "passage_text": "x"},
    "body": {"docno": "1", "title": "T", "body": "x", "query_id": "2", "query": "y"},
}
"""Corpora by the name of their text."""


def as_texts(path: Path, row: dict[str, Any]) -> Path:
    """A file of texts with one row."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif path.suffix == ".jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        between = "\t" if path.suffix == ".tsv" else ","
        path.write_text("".join(between.join(map(str, line)) + "\n" for line in (row, row.values())))
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".tsv", ".csv", ".parquet"])
@pytest.mark.parametrize("name", NAMED)
def test_a_title_is_never_the_text_by_itself(tmp_path: Path, name: str, ending: str) -> None:
    path = as_texts(tmp_path / f"a{ending}", NAMED[name])
    assert texts_of(path) == {"1": "T x"}
    path = as_texts(path, {("unknown" if key == name else key): value for key, value in NAMED[name].items()})
    with pytest.raises(
        InputError, match=r"which of its columns \(.*'title'.*\) .* Name it with --corpus-text"
    ):
        texts_of(path)
    assert texts_of(path, texts=("unknown",)) == {"1": "x"}
    assert texts_of(path, texts=("title", "unknown")) == {"1": "T x"}
    assert texts_of(path, texts=("title",)) == {"1": "T"}  # as it was named
    with pytest.raises(InputError, match=r"(no column|no row has a text in) 'wrong' \(--corpus-text\)"):
        texts_of(path, texts=("wrong",))


@pytest.mark.parametrize(
    ("row", "message", "named", "expected"),
    [
        (
            {"pid": "7", "docid": "8", "text": "x"},
            "the id of the corpus could be in column 'pid' or 'docid': name it with --corpus-id",
            {"id": "docid"},
            {"8": "x"},
        ),
        ({"id": "7", "docno": "8", "text": "x"}, "'id' or 'docno'", {"id": "docno"}, {"8": "x"}),
        (
            {"id": "7", "text": "x", "contents": "y"},
            "text of the corpus could be in column 'text' or 'contents': name it with --corpus-text",
            {"texts": ("contents",)},
            {"7": "y"},
        ),
        (
            {"id": "7", "abstract": "x", "body": "y"},
            "--corpus-text",
            {"texts": ("abstract", "body")},
            {"7": "x y"},
        ),
        ({"number": "7", "text": "x"}, "--corpus-id", {"id": "number"}, {"7": "x"}),
    ],
)
@pytest.mark.parametrize("ending", [".jsonl", ".tsv", ".parquet"])
def test_columns_of_which_two_could_be_meant_are_asked_about(
    tmp_path: Path,
    row: dict[str, str],
    message: str,
    named: dict[str, Any],
    expected: dict[str, str],
    ending: str,
) -> None:
    path = as_texts(tmp_path / f"a{ending}", row)
    if not (ending == ".tsv" and len(row) == 2):  # which has no header then
        with pytest.raises(InputError, match=message):
            texts_of(path)
    assert texts_of(path, **named) == expected


def test_queries_have_names_of_their_own(tmp_path: Path) -> None:
    both = as_texts(
        tmp_path / "a.jsonl", {"qid": "q", "pid": "p", "query": "which", "passage": "this", "title": "T"}
    )
    assert texts_of(both, side="queries") == {"q": "which"}
    assert texts_of(both) == {"p": "T this"}
    with pytest.raises(InputError, match=r"the text of the queries.* --queries-text"):
        texts_of(as_texts(tmp_path / "b.jsonl", {"qid": "q", "title": "T", "narrative": "N"}), side="queries")


def test_a_passage_with_a_title_and_no_text(tmp_path: Path) -> None:
    rows = [
        {"_id": "1", "title": "T", "text": None},
        {"_id": "2", "title": "T", "text": ""},
        {"_id": "3", "title": "T"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts_of(tmp_path / "a.jsonl") == {"1": None, "2": "T", "3": None}  # the second as with BEIR


def test_another_choice_of_columns_is_another_index(tmp_path: Path) -> None:
    path = as_texts(tmp_path / "a.jsonl", {"id": "7", "text": "x", "other": "y"})
    for texts, expected in (((), "x"), (("other",), "y"), ((), "x")):
        index = on_disk([path], [fingerprint(path)], fields=TextFields("corpus", texts=texts))
        assert index.take(index.find(pa.array(["7"]))).to_pylist() == [expected]


def test_ambiguous_ids_of_runs_and_judgements_are_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"qid": "1", "pid": "a", "docid": "b", "score": 1.5}\n')
    with pytest.raises(InputError, match=r"passage_id could be in column 'pid' or 'docid': leave one out"):
        rows_of(path)
    path.write_text('{"qid": "1", "pid": "a", "label": 1, "score": 0}\n')
    with pytest.raises(InputError, match="relevance could be in column 'label' or 'score'"):
        read_qrels(path)
    path.write_text('{"qid": "1", "pid": "a", "label": 1}\n')  # the way out
    assert read_qrels(path)["relevance"].tolist() == [1]


def corpus(path: Path, texts: dict[str, str]) -> tuple[list[Path], list[str]]:
    path.write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()))
    return [path], [fingerprint(path)]


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(max_size=4), st.text(max_size=6), min_size=1, max_size=20),
    st.lists(st.text(max_size=4), max_size=10),
    st.booleans(),
)
def test_an_index_finds_what_a_dictionary_finds(
    texts: dict[str, str], others: list[str], same_hash: bool
) -> None:
    hashes = index_module._hashes
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        if same_hash:
            patch.setattr(index_module, "_hashes", lambda ids: hashes(ids) % np.uint64(2))
        texts = {_whole(key): _whole(text) for key, text in texts.items()}
        others = [_whole(key) for key in others]
        files, marks = corpus(Path(directory) / "c.jsonl", texts)
        for index in (on_disk(files, marks), on_disk(files, marks), in_memory(files)):
            wanted = [*texts, *others]
            found = index.take(index.find(pa.array(wanted, pa.string()))).to_pylist()
            assert found == [texts.get(key) for key in wanted]


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def test_an_index_for_which_the_disk_has_no_room_is_not_kept(tmp_path: Path) -> None:
    """The disk is full in the last page of the hashes, which the C library writes only when it closes."""
    texts = {str(number): "text" for number in range(3_000)}
    on_disk(*corpus(tmp_path / "c.jsonl", texts))
    sizes = [path.stat().st_size for path in (tmp_path / f"c.jsonl{INDEX}").iterdir()]
    with small_disk(tmp_path / "disk", "4m") as disk:
        files, marks = corpus(disk / "c.jsonl", texts)
        pages = sum(-(-size // 4096) for size in (max(sizes), len(texts) * 8, files[0].stat().st_size))
        resize(disk, f"{4 * (pages - 1)}k")
        with pytest.raises(OutputError, match=r"cannot write the corpus' index .*: No space left on device"):
            on_disk(files, marks)
        assert [path.name for path in disk.iterdir()] == ["c.jsonl"]


def test_the_index_is_made_once_and_again_when_the_corpus_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, marks = corpus(tmp_path / "c.jsonl", {"a": "old"})
    on_disk(files, marks)
    folder = tmp_path / f"c.jsonl{INDEX}"
    before = folder.stat().st_ino
    on_disk(files, marks)
    assert folder.stat().st_ino == before
    files, marks = corpus(tmp_path / "c.jsonl", {"a": "new", "b": "more"})
    index = on_disk(files, marks)
    assert index.take(index.find(pa.array(["b", "a", "c"]))).to_pylist() == ["more", "new", None]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]
    shutil.rmtree(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    on_disk(files, marks)
    assert not folder.exists()
    assert len(list((tmp_path / "cache" / "rankmill" / "corpora").iterdir())) == 1


def test_a_folder_of_texts_is_read_again_without_its_index(tmp_path: Path) -> None:
    files, marks = corpus(tmp_path / "c.jsonl", {"a": "x"})
    on_disk(files, marks)
    for name in (tmp_path, tmp_path / "**"):
        assert [file.path for file in find_files([str(name)])] == files


def test_an_index_that_another_process_has_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, marks = corpus(tmp_path / "c.jsonl", {"a": "x"})
    build, inodes = index_module._build, []

    def after_another(*arguments: Any) -> None:
        monkeypatch.setattr(index_module, "_build", build)
        on_disk(files, marks)
        inodes.append((tmp_path / f"c.jsonl{INDEX}").stat().st_ino)
        build(*arguments)

    monkeypatch.setattr(index_module, "_build", after_another)
    index = on_disk(files, marks)
    assert index.take(index.find(pa.array(["a"]))).to_pylist() == ["x"]
    assert [path.stat().st_ino for path in tmp_path.iterdir() if path.is_dir()] == inodes


def test_what_a_killed_process_has_made_of_an_index_is_removed(tmp_path: Path) -> None:
    files, marks = corpus(tmp_path / "c.jsonl", {"a": "x"})
    killed = "import os, sys, pathlib, rankmill.producer.files.corpus.index as i\n"
    killed += "i._build = lambda *_: os._exit(9)\ni.on_disk([pathlib.Path(sys.argv[1])], ['1'])"
    subprocess.run([sys.executable, "-c", killed, files[0]], check=False)
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    os.utime(left, (0, 0))
    on_disk(files, marks)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [f"c.jsonl{INDEX}"]


def test_an_index_that_another_process_makes_at_the_same_time_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, marks = corpus(tmp_path / "c.jsonl", {"a": "x"})
    folder = tmp_path / f"c.jsonl{INDEX}"
    remove = shutil.rmtree

    def and_put_another(path: Path, **options: Any) -> None:
        remove(path, **options)
        if path == folder:
            folder.mkdir()
            (folder / "texts").write_text("of another process")

    monkeypatch.setattr(shutil, "rmtree", and_put_another)
    index = on_disk(files, marks)
    assert index.take(index.find(pa.array(["a"]))).to_pylist() == ["x"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]


def test_an_id_with_two_texts_is_named_with_both_places(tmp_path: Path) -> None:
    files = [tmp_path / "c.tsv", tmp_path / "d.tsv"]
    files[0].write_text("a\tx\nb\ty\n")
    files[1].write_text("c\tx\na\tz\n")
    message = (
        r"id 'a' has two texts: in row 0 \(counted from 0\) of .*c.tsv and in row 1 .* of .*d.tsv; keep one, "
        "or say which with --on-duplicate first or last"
    )
    for read in (partial(on_disk, files, ["one", "two"]), partial(in_memory, files)):
        with pytest.raises(InputError, match=message):
            read()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.tsv", "d.tsv"]
    for which, text in (("first", "x"), ("last", "z"), ("first", "x")):
        for index in (in_memory(files, which), on_disk(files, ["one", "two"], which)):  # type: ignore[arg-type]
            found = index.take(index.find(pa.array(["a", "b"]))).to_pylist()
            assert found == [text, "y"]
    with pytest.raises(InputError, match="has two texts"):  # the index that took the first is another
        on_disk(files, ["one", "two"])


@pytest.mark.parametrize("same_hash", [False, True])
def test_an_id_with_one_text_may_be_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_hash: bool
) -> None:
    if same_hash:
        monkeypatch.setattr(index_module, "_hashes", lambda ids: np.zeros(len(ids), np.uint64))
    path = tmp_path / "c.jsonl"
    lines = ['{"id": "a", "text": "x"}', '{"id": "b", "text": null}'] * 3
    path.write_text("\n".join(lines))
    for index in (on_disk([path], ["mark"]), in_memory([path])):
        assert index.take(index.find(pa.array(["b", "a", "c"]))).to_pylist() == [None, "x", None]
    path.write_text("\n".join([*lines, '{"id": "a", "text": null}']))
    with pytest.raises(InputError, match=r"id 'a' has two texts: in row 0 .* and in row 6 "):
        on_disk([path], ["changed"])


@pytest.fixture
def files(tmp_path: Path) -> RankingFiles:
    (tmp_path / "q.tsv").write_text("1\tfirst\n2\tsecond\n3\t \n")
    (tmp_path / "c.tsv").write_text("a\tA\nb\tB\nd\tD\n")
    run = as_run(tmp_path / "r.trec")
    return RankingFiles(InputFile(run), (InputFile(tmp_path / "q.tsv"),), (InputFile(tmp_path / "c.tsv"),))


def joined(files: RankingFiles, *, allow_missing: bool = True) -> RankingSource:
    return RankingSource(files, [fingerprint(file.path) for file in files.all], allow_missing=allow_missing)


def test_texts_are_looked_up(files: RankingFiles) -> None:
    source = joined(files, allow_missing=False)
    table = pa.concat_tables(list(source.tables(Sizing(3))))
    assert (source.rows, [len(part) for part in source.tables(Sizing(3))]) == (4, [3, 1])
    assert table["query"].to_pylist() == ["first", "first", "second", "second"]
    assert table["passage"].to_pylist() == ["A", "B", "A", "D"]
    assert table["run_score"].to_pylist() == [9.5, 8.25, 7.0, 6.5]


def test_what_is_missing_is_named(files: RankingFiles) -> None:
    as_run(Path(files.ranking.path), [("1", "x", 1, 1.0), ("9", "a", 1, 1.0), ("3", "b", 1, 1.0)])
    (table,) = joined(files).tables(Sizing(10))
    errors = pa.array(["passage is null", "query is null", "query is null"])
    part = joined(files).explain(ScoredTable(table, pa.nulls(3, pa.float32()), errors, None, 1, "w"))
    assert [error.split(" in /")[0] for error in part.errors.to_pylist()] == [
        "no text for doc_id 'x'", "no text for query_id '9'", "no text for query_id '3'"
    ]  # fmt: skip
    pq.write_table(table, files.ranking.path.with_name("out.parquet"))
    assert pq.read_table(files.ranking.path.with_name("out.parquet")).to_pylist() == table.to_pylist()
    with pytest.raises(InputError, match=r"r.trec: query_id '9' is not in .*q.tsv"):
        joined(files, allow_missing=False)


def deep(files: RankingFiles, depth: int) -> list[str]:
    """The passages that are scored of a run, to a depth."""
    cut = RankingFiles(files.ranking, files.queries, files.corpus, depth=depth)
    return [doc for table in joined(cut).tables(Sizing(10)) for doc in table["doc_id"].to_pylist()]


def test_depth_goes_by_score_then_by_rank(files: RankingFiles) -> None:
    path = Path(files.ranking.path)
    as_run(path, [("1", "a", 1, 1.0), ("1", "b", 3, 2.0), ("1", "d", 2, 9.0), ("2", "a", 1, 0.0)])
    assert deep(files, 2) == ["b", "d", "a"]
    as_run(path, [("1", "a", 0, 1.0), ("1", "b", 0, 7.0), ("1", "d", 0, 9.0)])  # as BEIR writes runs
    assert deep(files, 2) == ["b", "d"]
    path.write_text("1 a 0.5\n1 b 0.1\n1 d 0.9\n")
    assert deep(files, 2) == ["a", "d"]
    path.write_text("query_id doc_id rank\n1 a 3\n1 b 1\n1 d 2\n")
    assert deep(files, 2) == ["b", "d"]
    path.write_text("1 a\n1 b\n1 d\n")
    assert deep(files, 2) == ["a", "b"]
    path.write_text("1 a\n1 b\n1 d\n2 a\n1 b\n")
    with pytest.raises(InputError, match="passages of query '1' do not follow each other"):
        deep(files, 2)


def test_a_row_without_a_score_is_the_last(files: RankingFiles) -> None:
    path = Path(files.ranking.path).with_suffix(".jsonl")
    rows = [("a", None, 1), ("b", 0.5, 3), ("d", -1.5, 2)]
    lines = [{"qid": "1", "docid": doc, "score": score, "rank": rank} for doc, score, rank in rows]
    lines += [{"qid": "2", "docid": doc, "score": None, "rank": rank} for doc, _, rank in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cut = RankingFiles(InputFile(path), files.queries, files.corpus)
    assert deep(cut, 2) == ["b", "d", "a", "d"]  # the second query has ranks and no scores


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("12"), st.text("abAB19é", min_size=1, max_size=3), st.integers(0, 3)),
        min_size=1, max_size=20, unique_by=lambda row: row[:2],
    ),
    st.integers(1, 5),
)  # fmt: skip
def test_depth_takes_what_trec_eval_ranks_first(rows: list[tuple[str, str, int]], depth: int) -> None:
    rows.sort(key=lambda row: row[0])
    run: dict[str, dict[str, float]] = {}
    for query, doc, score in rows:
        run.setdefault(query, {})[doc] = float(score)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "q.tsv").write_text("1\tfirst\n2\tsecond\n")
        (Path(folder) / "c.tsv").write_text("".join(f"{doc}\tT\n" for _, doc, _ in rows))
        path = as_run(Path(folder) / "r.trec", [(query, doc, 0, score) for query, doc, score in rows])
        inputs = [InputFile(Path(folder) / name) for name in ("q.tsv", "c.tsv")]
        found = deep(RankingFiles(InputFile(path), (inputs[0],), (inputs[1],)), depth)
    expected = [doc for query, doc, _ in rows if rank_of(run[query], doc) <= depth]
    assert found == expected


def rank_of(scores: dict[str, float], doc: str) -> int:
    """The rank that trec_eval gives a passage of a query."""
    evaluator = pytrec_eval.RelevanceEvaluator({"q": {doc: 1}}, {"recip_rank"})
    reciprocal: float = evaluator.evaluate({"q": scores})["q"]["recip_rank"]
    return round(1 / reciprocal)


@pytest.mark.parametrize(
    ("thirds", "is_score"),
    [
        ("1 2 3", False),
        ("0 1 2", False),
        ("4 9 17", False),
        ("3 2 1", True),
        ("30 29 29", True),
        ("0 0 0", True),
        ("7 12 3.5", True),
        ("-1 2 3", True),
        ("1e3 2 3", True),
    ],
)
def test_scores_in_the_third_field_are_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thirds: str, is_score: bool
) -> None:
    numbers = thirds.split()
    path = tmp_path / "run.tsv"
    lines = [
        f"{query}\t{doc}\t{number}\n" for query in "12" for doc, number in zip("abd", numbers, strict=True)
    ]
    mixed = lines[::3] + lines[1::3] + lines[2::3]
    for order, block in ((lines, 1 << 20), (mixed, 1 << 20), (lines, 1)):  # also line by line
        monkeypatch.setattr(trec, "_BLOCK_BYTES", block)
        path.write_text("".join(order))
        found = [row[3] if is_score else row[2] for row in rows_of(path)]
        assert sorted(found) == sorted([float(number) for number in numbers] * 2)


def test_third_fields_that_could_be_ranks_or_scores_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.tsv"
    path.write_text("1 a 7\n1 b 12\n1 d 3\n")
    with pytest.raises(InputError, match=r"run\.tsv: its third fields could be ranks or scores") as error:
        rows_of(path)
    monkeypatch.setattr(trec, "_BLOCK_BYTES", 1)  # in several parts, none of which has a query twice
    path.write_text("1 a 7\n2 a 12\n")
    with pytest.raises(InputError, match=r"run\.tsv: its third fields could be ranks or scores"):
        rows_of(path)
    for name, place in (("rank", 2), ("score", 3)):
        header = f"query_id doc_id {name}"
        assert header in str(error.value)
        path.write_text(f"{header}\n1 a 7\n1 b 12\n1 d 3\n")
        assert [row[place] for row in rows_of(path)] == [7, 12, 3]


def test_the_rank_of_another_ranking_is_none_of_a_table_with_scores(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"  # as an output of score-file --run
    path.write_text('{"query_id": "1", "doc_id": "a", "run_rank": 3, "run_score": 9.5, "score": 1.5}\n')
    assert rows_of(path) == [("1", "a", None, 1.5)]
    path.write_text('{"query_id": "1", "doc_id": "a", "run_rank": 3, "run_score": 9.5}\n')
    assert rows_of(path) == [("1", "a", 3, 9.5)]


def test_judgements_add_labels_and_what_the_run_lacks(files: RankingFiles, tmp_path: Path) -> None:
    qrels = tmp_path / "qrels.txt"
    qrels.write_text("1 0 b 2\n1 0 d 1\n2 0 a 0\n2 0 b 0\n3 0 a 1\n")
    labelled = RankingFiles(files.ranking, files.queries, files.corpus, depth=1, qrels=InputFile(qrels))
    (table,) = joined(labelled).tables(Sizing(10))
    rows = list(
        zip(*(table[name].to_pylist() for name in ("query_id", "doc_id", "relevance", "in_run")), strict=True)
    )
    assert rows == [("1", "a", None, True), ("2", "a", 0, True), ("1", "b", 2, False), ("1", "d", 1, False)]
    assert table["passage"].to_pylist() == ["A", "A", "B", "D"]
    assert joined(labelled).rows == 4


def test_a_file_that_changes_is_noticed(files: RankingFiles) -> None:
    source = joined(files)
    Path(files.queries[0].path).write_text("1\tother\n")
    with pytest.raises(InputChanged, match=r"q.tsv has changed"):
        source.check_unchanged()
