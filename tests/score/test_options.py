"""Every option of score-file with every kind of input and output: it does something, or it is refused.

It does something if the command's files are others than without it. So an option that is forgotten somewhere
cannot pass, and a new one needs a line in `OPTIONS`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import ir_datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from ir_datasets.formats import BaseScoredDocs, GenericScoredDoc

from rankmill.cli.score import score_file
from rankmill.jobs.contract.file_request import FileRequest
from tests.conftest import Server
from tests.harness.processes import messages_in
from tests.harness.tools import slow_but

ROWS = [
    {"query_id": 1 + n // 4, "group": 1 + n // 3, "pid": f"p{n % 4}", "page": f"d{n % 4}", "query": "moon",
     "other": "cat", "passage": "" if n == 3 else f"moon river {n}", "n": n}
    for n in range(8)
]  # fmt: skip
"""Rows that each option changes something of; the passage of the fourth is null."""

KINDS: dict[str, list[str]] = {
    "CSV": ["pairs.csv"],
    "TSV": ["pairs.tsv"],
    "JSON Lines": ["pairs.jsonl"],
    "Parquet": ["pairs.parquet"],
    "several": ["first.jsonl", "pairs.csv"],
    "standard input": ["-"],
    "a run": ["--run", "bm25.trec", "--queries", "queries.jsonl", "--corpus", "corpus.jsonl"],
    "a dataset": ["--dataset", "irds:rankmill-options"],
    "a shard": ["pairs.csv", "--shard", "1/2"],
    "parts": ["pairs.csv", "--rows-per-part", "4"],
    "reuse": ["pairs.csv", "--reuse", "earlier.parquet"],
    "several models": ["pairs.csv", "--model", "demo", "--model", "TINY"],
    "their mean": ["pairs.csv", "--model", "demo", "--model", "TINY", "--mean", "ranks"],
    "the best": ["pairs.csv", "--top-k", "3"],
    "TREC": ["pairs.csv", "--output-format", "trec"],
    "a run to TREC": ["--run", "bm25.trec", "--queries", "queries.jsonl", "--corpus", "corpus.jsonl",
                      "--output-format", "trec"],
}  # fmt: skip

OPTIONS: dict[str, list[str]] = {
    "run": ["--run", "other.trec"],
    "queries": ["--queries", "queries-2.jsonl"],
    "corpus": ["--corpus", "corpus-2.jsonl"],
    "dataset": ["--dataset", "irds:rankmill-options-2"],
    "queries_id": ["--queries-id", "other_id"],
    "queries_text": ["--queries-text", "other"],
    "corpus_id": ["--corpus-id", "other_id"],
    "corpus_text": ["--corpus-text", "other"],
    "on_duplicate": ["--corpus", "corpus-2.jsonl", "--on-duplicate", "last"],
    "depth": ["--depth", "2"],
    "qrels": ["--qrels", "qrels.txt"],
    "with_texts": ["--with-texts"],
    "output_format": ["--output-format", "jsonl"],
    "top_k": ["--top-k", "2"],
    "tag": ["--tag", "mine"],
    "query_column": ["--query-column", "other"],
    "passage_column": ["--passage-column", "other"],
    "text_column": ["--text-column", "passage"],
    "messages_column": ["--messages-column", "passage"],
    "score_column": ["--score-column", "found"],
    "rank_column": ["--rank-column", "place"],
    "query_id_column": ["--query-id-column", "group"],
    "passage_id_column": ["--passage-id-column", "page"],
    "text_columns": ["--text-columns", "n"],
    "list_columns": ["--list-columns", "words"],
    "columns": ["--columns", "query_id,group,pid,page,other,query,n,passage"],
    "delimiter": ["--delimiter", "comma"],
    "limit": ["--limit", "3"],
    "shard": ["--shard", "2/2"],
    "rows_per_part": ["--rows-per-part", "3"],
    "reuse": ["--reuse", "earlier.parquet"],
    "mean": ["--mean", "scores"],
    "on_null": ["--on-null", "fail"],
    "models": ["--model", "TINY"],
}
SAME = {
    ("delimiter", None), ("reuse", None), ("text_columns", "TREC"),
    ("text_columns", "several"), ("passage_id_column", "a run to TREC"),
}  # fmt: skip
"""Options that, where they work, change nothing about these rows; ``None``: of all kinds."""

ELSEWHERE = {"inputs", "output", "force", "restart"}
"""Fields that are the input and the output themselves, or what becomes of files that are there."""


def test_every_option_has_its_line() -> None:
    assert OPTIONS.keys() - {"dataset"} == FileRequest.model_fields.keys() - ELSEWHERE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_queue: Server) -> Path:
    """Files of each kind, and an earlier output."""
    folder = tmp_path_factory.mktemp("options")
    rows = [{**row, "passage": row["passage"] or None, "words": ["a", "b"]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "pairs.jsonl").write_text("".join(lines))
    (folder / "first.jsonl").write_text("".join(lines[:1]))
    for name, delimiter in (("pairs.csv", ","), ("pairs.tsv", "\t")):
        texts = [delimiter.join(ROWS[0]), *(delimiter.join(map(str, row.values())) for row in ROWS)]
        (folder / name).write_text("\n".join(texts) + "\n")
    run = [f"q{q} Q0 d{d} {d + 1} {9 - d} t\n" for q in (1, 2) for d in range(4)]
    (folder / "bm25.trec").write_text("".join(run))
    (folder / "other.trec").write_text("".join(run[1:]))
    (folder / "qrels.txt").write_text("q1 0 d1 1\nq1 0 d9 1\n")
    for end, word in (("", "moon"), ("-2", "cat")):
        queries = {f"q{q}": f"how far is the {word} {q}" for q in (1, 2)}
        corpus = {f"d{d}": f"{word} river {d}" for d in range(10) if d != 3}
        for what, texts_by_id in (("queries", queries), ("corpus", corpus)):
            items = [
                {"_id": key, "text": text, "other_id": f"{key[0]}{9 - int(key[1:])}", "other": f"{text} cat"}
                for key, text in texts_by_id.items()
            ]
            (folder / f"{what}{end}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in items))
            texts = [f"{key}\t{text}\n" for key, text in texts_by_id.items()]
            (folder / f"{what}{end}.tsv").write_text("".join(texts))
    environ = {"REDIS_URL": shared_queue.url, "RANKMILL_MODEL": "demo", "RANKMILL_PRECISION": "fp32"}
    done = CliRunner().invoke(
        score_file, [str(folder / "pairs.csv"), "-o", str(folder / "earlier.parquet")], env=environ
    )
    assert done.exit_code == 3, done.output
    return folder


class _Found(BaseScoredDocs):  # type: ignore[misc]
    """The run of a dataset."""

    def scoreddocs_iter(self) -> Iterator[GenericScoredDoc]:
        return iter([GenericScoredDoc("q1", f"d{n}", 1.0 - n) for n in range(5)])


@pytest.fixture(scope="module", autouse=True)
def datasets(folder: Path) -> None:
    """Two datasets that ir_datasets knows in this process."""
    for end in ("", "-2"):
        plain = ir_datasets.create_dataset(
            docs_tsv=str(folder / f"corpus{end}.tsv"), queries_tsv=str(folder / f"queries{end}.tsv")
        )
        whole = ir_datasets.datasets.base.Dataset(_Found(), plain)
        ir_datasets.registry._registered[f"rankmill-options{end}"] = (
            whole  # again, if the module is begun again
        )


@pytest.fixture
def score(
    folder: Path, shared_queue: Server, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, object]]:
    """Runs score-file in `folder`; returns what it said last, and what it has made, if anything."""
    monkeypatch.chdir(folder)
    environ = {"REDIS_URL": shared_queue.url, "RANKMILL_MODEL": "demo", "RANKMILL_PRECISION": "fp32"}
    environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "IR_DATASETS_HOME": str(folder / "irds")}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[str, object]:
        shutil.rmtree("out", ignore_errors=True)
        Path("out").unlink(missing_ok=True)
        named = [str(tiny_model) if word == "TINY" else word for word in words]
        data = (folder / "pairs.csv").read_bytes()
        done = CliRunner().invoke(score_file, ["--output-format", "parquet", *named, "-o", "out"], input=data)
        assert done.exit_code in {0, 2, 3}, done.output
        assert isinstance(done.exception, SystemExit | None), done.output
        last = messages_in(done.stderr)[-1:]
        return "".join(last), None if done.exit_code == 2 else made(folder / "out")

    return run


def made(output: Path) -> object:
    """The names and contents of the files of an output, scores to three digits."""
    files = sorted(output.iterdir()) if output.is_dir() else [output]
    return [(file.name, content(file)) for file in files if "errors" not in file.name]


def content(file: Path) -> object:
    raw = file.read_bytes()
    if raw.startswith(b"PAR1"):
        table = pq.read_table(file)
        return table.schema.names, [[rounded(value) for value in row.values()] for row in table.to_pylist()]
    return [[rounded(word) for word in line.split()] for line in raw.decode().splitlines()]


def rounded(value: object) -> object:
    try:
        return round(float(str(value)), 3) if "." in str(value) else value
    except ValueError:
        return value


PLAIN: dict[str, object] = {}
"""What was made of each kind without an option."""


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", slow_but(KINDS, "CSV", "a run", "TREC"))
def test_an_option_works_or_is_refused(
    score: Callable[..., tuple[str, object]], kind: str, option: str
) -> None:
    words = ["--delimiter", "tab"] if (option, kind) == ("delimiter", "TSV") else OPTIONS[option]
    if kind not in PLAIN:
        said, PLAIN[kind] = score(*KINDS[kind])
        assert PLAIN[kind], said
    plain = PLAIN[kind]
    said, found = score(*KINDS[kind], *words)
    if found is None:
        assert any(word in said for word in [*words, *KINDS[kind]] if len(word) > 3), said
    elif {(option, None), (option, kind)} & SAME:
        assert found == plain
    else:
        assert found != plain, f"{' '.join(words)} did nothing"


@pytest.mark.parametrize(
    "words", [["--workers", "2"], ["--device", "cpu"], ["--backend", "torch"], ["--long-stride", "9"]]
)
def test_a_setting_that_has_no_effect_is_refused(
    score: Callable[..., tuple[str, object]], words: list[str]
) -> None:
    said, found = score("pairs.csv", *words)
    assert found is None
    assert words[0] in said
