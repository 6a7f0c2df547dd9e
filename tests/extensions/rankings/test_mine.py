"""rankmill mine: the negatives that sentence-transformers' mine_hard_negatives chooses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result
from datasets import Dataset, load_dataset
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments, losses
from sentence_transformers.util import mine_hard_negatives

from rankmill.cli.main import rankmill
from rankmill.extensions.rankings.mine import Rules, mine
from rankmill.producer.files.outputs import OutputFormat
from tests.harness.models.embeddings import bags

QUERIES = [f"how far is {n}" for n in range(6)]
CORPUS = [f"moon river {'big ' * (n % 5)}{n}" for n in range(15)]
POSITIVES = {query: CORPUS[2 * n] for n, query in enumerate(QUERIES)}


def score(query: str, passage: str) -> float:
    return random.Random(query + passage).uniform(-5, 5) + (4 if POSITIVES[query] == passage else 0)


class Scores:
    """A cross-encoder for sentence-transformers, with the scores of the file."""

    def predict(self, pairs: list[tuple[str, str]], **options: Any) -> Any:
        return torch.tensor([score(*pair) for pair in pairs])


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all passages, as score-file writes it; the positive of one query is not in it."""
    rows = [
        {"query_id": str(n), "doc_id": str(m), "relevance": 1 if POSITIVES[query] == passage else None,
         "in_run": (n, m) != (3, 6), "query": query, "passage": passage,
         "score": float(torch.tensor(score(query, passage)))}
        for n, query in enumerate(QUERIES) for m, passage in enumerate(CORPUS)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("scored") / "scored.parquet"
    schema = pa.schema({"relevance": pa.int64(), "score": pa.float32()})
    table = pa.Table.from_pylist(rows)
    for field in schema:
        table = table.set_column(
            table.column_names.index(field.name), field, table[field.name].cast(field.type)
        )
    pq.write_table(table, path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(rankmill, ["mine", *map(str, arguments)])


def test_a_file_without_rows_has_no_negatives(scored: Path, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(scored).slice(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "texts.jsonl").write_text('{"_id": "0", "text": "moon"}\n')
    texts = ("--queries", tmp_path / "texts.jsonl", "--corpus", tmp_path / "texts.jsonl")
    for options in ((), texts):
        done = run(tmp_path / "empty.parquet", *options, "-o", tmp_path / "mined.jsonl")
        assert (done.exit_code, done.exception is None or isinstance(done.exception, SystemExit)) == (2, True)
        assert "empty.parquet: no negatives are left" in done.output


@pytest.mark.parametrize("form", ["triplet", "n-tuple", "labeled-pair", "labeled-list"])
@pytest.mark.parametrize(
    "rules",
    [
        {"absolute_margin": 1.0},
        {"relative_margin": 0.3, "range_min": 1},
        {"max_score": 3.0, "min_score": -3.0},
    ],
    ids=str,
)
def test_the_same_negatives_as_sentence_transformers(
    scored: Path, tmp_path: Path, form: str, rules: dict[str, Any]
) -> None:
    dataset = Dataset.from_dict({"query": QUERIES, "answer": list(POSITIVES.values())})
    expected = mine_hard_negatives(
        dataset, bags(), corpus=CORPUS, cross_encoder=Scores(),
        range_max=len(CORPUS), num_negatives=2, output_format=form, verbose=False, **rules,
    )  # fmt: skip
    options = [part for name, value in rules.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = run(scored, "--format", form, "--num-negatives", 2, *options, "-o", tmp_path / "out.parquet")
    assert done.exit_code == 0, done.output
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert sorted(map(flat, found)) == sorted(map(flat, expected))
    assert len(found) >= 6


@pytest.mark.parametrize("form", ["triplet", "labeled-list"])
@pytest.mark.parametrize("options", [{}, {"range_min": 1}, {"absolute_margin": 0.5}], ids=str)
@pytest.mark.parametrize("has_texts", [True, False], ids=["texts in the file", "texts in a corpus"])
def test_texts_are_compared_as_sentence_transformers_does(
    tmp_path: Path, form: str, options: dict[str, Any], has_texts: bool
) -> None:
    """Half of the passages are there under three ids, in any order; each positive is judged under one."""
    names = [(text, copy) for place, text in enumerate(CORPUS) for copy in range(1 if place % 2 else 3)]
    random.Random(3).shuffle(names)
    retriever = bags()
    ranked = retriever.similarity(*map(retriever.encode_query, (QUERIES, CORPUS))).tolist()
    rows = [
        {"query_id": f"q{n}", "doc_id": f"d{m}", "relevance": int(text == POSITIVES[query] and copy == 0),
         "run_rank": 0, "run_score": ranked[n][CORPUS.index(text)], "query": query, "passage": text,
         "score": score(query, text)}
        for n, query in enumerate(QUERIES) for m, (text, copy) in enumerate(names)
    ]  # fmt: skip
    table, sources = pa.Table.from_pylist(rows), list[object]()
    if not has_texts:
        for name, column, key in (("queries", "query", "query_id"), ("corpus", "passage", "doc_id")):
            path = tmp_path / f"{name}.parquet"
            pq.write_table(pa.table({"_id": table[key], "text": table[column]}), path)
            sources += [f"--{name}", path]
        table = table.drop_columns(["query", "passage"])
    pq.write_table(table, tmp_path / "scored.parquet")
    expected = mine_hard_negatives(
        Dataset.from_dict({"query": QUERIES, "answer": list(POSITIVES.values())}), retriever,
        corpus=[text for text, _ in names], cross_encoder=Scores(), num_negatives=4, min_score=-99.0,
        output_format=form, verbose=False, **{"range_max": len(CORPUS), **options},
    )  # fmt: skip
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    output = tmp_path / "out.jsonl"
    done = run(
        tmp_path / "scored.parquet", *sources, "--format", form, "--num-negatives", 4, *given, "-o", output
    )
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(map(flat, found)) == sorted(map(flat, expected))
    copies = 2 * len(QUERIES)  # of each query's positive
    repeats = len(rows) - len(CORPUS) * len(QUERIES) - copies
    assert f"already: {copies} passages that are relevant under another id, {repeats} that" in done.output


def of_texts(texts: dict[str, str], judged: dict[str, int], query: str = "q") -> list[dict[str, Any]]:
    """Rows of a scored file: of one query, passages of equal scores."""
    return [
        {"query_id": query, "doc_id": name, "relevance": judged.get(name), "query": query[0], "passage": text,
         "score": 1.0}
        for name, text in texts.items()
    ]  # fmt: skip


def test_what_is_relevant_under_another_id_is_no_negative(tmp_path: Path) -> None:
    """Nor what is related, or relevant to an equal query; and a positive is there once."""
    scored = tmp_path / "scored.parquet"
    texts = {"a": "A", "b": "A", "c": "B", "d": "B", "e": "C", "f": "D", "g": "A"}
    rows = of_texts(texts, {"a": 2, "c": 1, "g": 2}) + of_texts({"e": "C", "f": "D"}, {"e": 2}, "q-again")
    pq.write_table(pa.Table.from_pylist(rows), scored)
    output = tmp_path / "out.jsonl"
    done = run(scored, "--min-relevance", 2, "--format", "labeled-list", "-o", output)
    assert done.exit_code == 0, done.output
    found = [json.loads(line)["passages"] for line in output.read_text().splitlines()]
    assert found == [["A", "D"], ["C", "D"]]
    assert "already: 3 passages that are relevant under another id, 0 that repeat" in done.output


def test_a_relevant_passage_outside_of_the_run_is_no_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.trec").write_text("q Q0 a 1 4 x\nq Q0 b 2 3 x\nq Q0 c 3 2 x\n")
    Path("qrels.txt").write_text("q 0 a 1\nq 0 z 1\n")
    Path("queries.tsv").write_text("q\tthe query\n")
    Path("corpus.tsv").write_text("a\tfirst\nb\tlast\nc\tsecond\nz\tlast\n")
    texts = ["--queries", "queries.tsv", "--corpus", "corpus.tsv"]
    done = run("run.trec", "--qrels", "qrels.txt", *texts, "-o", "out.jsonl")
    assert done.exit_code == 0, done.output
    assert (
        Path("out.jsonl").read_text()
        == '{"anchor": "the query", "positive": "first", "negative": "second"}\n'
    )
    assert "already: 1 passages" in done.output
    done = run("run.trec", "--qrels", "qrels.txt", "--format", "msmarco", "-o", "ids.tsv")
    assert "texts are not compared, as run.trec has none" in done.output


def test_the_first_of_a_run_are_the_best_by_its_scores(tmp_path: Path) -> None:
    """Whatever their order in the file, and whatever its ranks say."""
    scored = tmp_path / "scored.parquet"
    rows = of_texts({name: name for name in "abcde"}, {"a": 1})
    for at, row in enumerate(rows):
        row |= {"run_rank": 0, "run_score": float(at)}
    pq.write_table(pa.Table.from_pylist(rows), scored)
    run(scored, "--range-max", 2, "--format", "labeled-list", "-o", tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["passages"] == ["a", "e", "d"]


def test_the_texts_are_those_that_were_scored(tmp_path: Path) -> None:
    """Not those of columns with the usual names."""
    scored = tmp_path / "scored.parquet"
    rows = of_texts({"a": "A", "b": "B", "c": "C"}, {"a": 1})
    for row in rows:
        row.update({"question": "q", "body": row["passage"], "query": "other", "passage": "the same"})
        row.update({"ours": 0.0 if row["doc_id"] == "b" else 1.0})
    names = {"query": "question", "passage": "body", "score": "ours"}
    names = {f"rankmill.{role}_column": name for role, name in names.items()}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(names), scored)
    assert run(scored, "--format", "labeled-list", "-o", tmp_path / "out.jsonl").exit_code == 0
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert (found["anchor"], found["passages"]) == ("q", ["A", "C", "B"])


@pytest.mark.parametrize("cut", ["rank", "gap"])
def test_the_first_of_a_run_cannot_be_told_after_top_k(tmp_path: Path, cut: str) -> None:
    scored = tmp_path / "scored.parquet"
    rows = of_texts({name: name for name in "abcde"}, {"a": 1})
    for at, row in enumerate(rows, 1):
        row.update({"run_rank": at, "rank": at} if cut == "rank" else {"run_rank": 2 * at})
    pq.write_table(pa.Table.from_pylist(rows), scored)
    done = run(scored, "--range-max", 2, "-o", tmp_path / "out.jsonl")
    assert (done.exit_code, (tmp_path / "out.jsonl").exists()) == (2, False)
    assert "--range-max counts passages of the run, and the file lacks some" in done.output
    assert run(scored, "-o", tmp_path / "out.jsonl").exit_code == 0


def flat(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(value) for value in row.values())


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8), st.integers(0, 3), st.integers(1, 3),
    st.none() | st.floats(-1, 1), st.none() | st.floats(0, 1), st.sampled_from(["top", "random"]),
)  # fmt: skip
def test_every_negative_keeps_the_rules(
    scores: list[float], range_min: int, number: int, absolute: float | None, relative: float | None, how: str
) -> None:
    table = pd.DataFrame(
        {"query_id": "q", "score": scores, "relevance": [1] + [None] * (len(scores) - 1), "in_run": True}
    )
    margins = {"absolute_margin": absolute, "relative_margin": relative}
    rules = Rules(range_min=range_min, num_negatives=number, sampling_strategy=how, **margins)  # type: ignore[arg-type]
    (found,) = mine(table, rules)
    chosen = [scores[row] for row in found.negatives]
    assert found.positives.tolist() == [0]
    assert 0 not in found.negatives
    assert len(set(found.negatives.tolist())) == len(chosen) <= number
    assert chosen == sorted(chosen, reverse=True)
    limits = [scores[0] - absolute] if absolute is not None else []
    limits += [scores[0] - abs(scores[0]) * relative] if relative is not None else []
    limit = min(limits, default=99)
    assert all(each <= limit + 1e-6 for each in chosen)


def test_scores_to_distil_from(scored: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = run(scored, "--format", "n-tuple", "--num-negatives", 1, "--with-scores", "-o", output)
    assert done.exit_code == 0, done.output
    for line in output.read_text().splitlines():
        row = json.loads(line)
        pair = [score(row["anchor"], row["positive"]), score(row["anchor"], row["negative_1"])]
        assert row["scores"] == pytest.approx(pair, abs=1e-5)


GRADES = {"q1": {"a": 3, "b": 1, "c": 2}, "q2": {"a": 1}, "q3": {"d": 2}, "q4": {}}
"""Of each query, the grades of its passages; those of the others, up to e, are not judged."""


def graded(path: Path) -> Path:
    rows = [
        {"query_id": query, "doc_id": name, "relevance": grades.get(name), "in_run": True, "query": query,
         "passage": name, "score": 0.1 if (query, name) == ("q3", "d") else 1.0}
        for query, grades in GRADES.items() for name in "abcde"
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_passage_is_relevant_from_a_grade_on_and_the_counts_say_which(tmp_path: Path) -> None:
    scored = graded(tmp_path / "scored.parquet")
    common = ["--num-negatives", 9, "--absolute-margin", 0, "--format", "labeled-list"]
    done = run(scored, *common, "-o", tmp_path / "all.jsonl")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [(row["anchor"], "".join(row["passages"])) for row in rows] == [
        ("q1", "ade"), ("q1", "bde"), ("q1", "cde"), ("q2", "abcde"),
    ]  # fmt: skip
    assert done.output.splitlines() == [
        f"4 rows from 2 of 4 queries are in {tmp_path / 'all.jsonl'}",
        "relevant passages: 2 of grade 1, 1 of grade 2, 1 of grade 3 (--min-relevance says which count)",
        "without rows: 1 queries that have no scored relevant passage, and 1 that have too few negatives",
    ]
    done = run(scored, *common, "--min-relevance", 2, "-o", tmp_path / "two.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [(row["anchor"], "".join(row["passages"])) for row in rows] == [("q1", "ade"), ("q1", "cde")]
    assert "2 rows from 1 of 4 queries" in done.output  # b, of grade 1, is neither relevant nor a negative
    assert "relevant passages: 1 of grade 2, 1 of grade 3" in done.output


def test_a_scored_file_with_a_passage_twice_is_refused(tmp_path: Path) -> None:
    table = pq.read_table(graded(tmp_path / "scored.parquet"))
    pq.write_table(pa.concat_tables([table, table.slice(1, 1)]), tmp_path / "scored.parquet")
    done = run(tmp_path / "scored.parquet", "-o", tmp_path / "out.jsonl")
    assert (done.exit_code, "query 'q1' has passage 'b' twice" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out.trec"], "training data is not a TREC run"),
        (["-o", "out.parquet", "--max-score", "-99"], "no negatives are left"),
        (["-o", "none/out.parquet"], "no such directory"),
    ],
)
def test_what_cannot_be_mined(
    scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(scored, *arguments)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())
    pq.write_table(pa.table({"query": ["q"]}), tmp_path / "other.parquet")
    done = run("other.parquet", "-o", "out.parquet")
    assert "no column query_id or qid" in done.stderr


def mined(scored: Path, output: Path, *options: object) -> list[dict[str, Any]]:
    done = run(scored, "--min-relevance", 2, "--num-negatives", 2, *options, "-o", output)
    assert done.exit_code == 0, done.output
    if output.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(output).to_pylist()
        return rows
    return [json.loads(line) for line in output.read_text().splitlines()]


def passage(name: str, score: float | None = None) -> dict[str, Any]:
    return {"docid": name, "title": "", "text": name} | ({} if score is None else {"score": score})


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_forms_of_other_trainers(tmp_path: Path, ending: str) -> None:
    """Passages a and c of q1 are relevant, and d of q3; b, of grade 1, is no negative."""
    scored, output = graded(tmp_path / "scored.parquet"), tmp_path / f"out.{ending}"
    of_flag, flag_3 = mined(scored, output, "--format", "flagembedding")
    assert of_flag == {"query": "q1", "pos": ["a", "c"], "neg": ["d", "e"],
                       "pos_scores": [1.0, 1.0], "neg_scores": [1.0, 1.0]}  # fmt: skip
    assert (flag_3["query"], flag_3["pos_scores"]) == ("q3", [0.1])
    output.unlink()
    of_tevatron, _ = mined(scored, output, "--format", "tevatron")
    assert of_tevatron == {
        "query_id": "q1", "query": "q1",
        "positive_passages": [passage("a"), passage("c")], "negative_passages": [passage("d"), passage("e")],
    }  # fmt: skip
    output.unlink()
    with_scores = mined(scored, output, "--format", "tevatron", "--with-scores")
    assert with_scores[1]["positive_passages"] == [passage("d", 0.1)]
    output.unlink()
    of_pylate = mined(scored, output, "--format", "pylate")
    assert of_pylate[:2] == [
        {"query": "q1", "documents": [first, "d", "e"], "scores": [1.0] * 3, "query_id": "q1",
         "document_ids": [first, "d", "e"]} for first in "ac"
    ]  # fmt: skip
    assert list(of_pylate[0])[:2] == ["query", "documents"]  # its collator warns of another order
    output.unlink()
    of_marco = mined(scored, output, "--format", "msmarco", "--with-scores")
    assert of_marco[0] == {"query_id": "q1", "positive_id": "a", "negative_id": "d", "score": 0.0}
    assert [row["score"] for row in of_marco[-2:]] == pytest.approx([-0.9, -0.9])


def test_pylates_rows_are_of_one_length(tmp_path: Path) -> None:
    """Its collator makes a tensor of the scores of a batch."""
    scored = graded(tmp_path / "scored.parquet")
    options = ["--min-relevance", 2, "--num-negatives", 3, "--format", "pylate", "-o", tmp_path / "out.jsonl"]
    done = run(scored, *options)
    assert "1 rows from 1 of 4 queries" in done.output  # q3; q1 has two negatives
    assert (
        "without rows: 2 queries that have no scored relevant passage, and 1 that have too few" in done.output
    )


def test_ms_marcos_triples_have_no_header(tmp_path: Path) -> None:
    scored, output = graded(tmp_path / "scored.parquet"), tmp_path / "triples.tsv"
    done = run(scored, "--format", "msmarco", "--min-relevance", 3, "-o", output)
    assert output.read_text() == "q1\ta\td\nq1\ta\te\n", done.output


def test_standard_output_has_only_the_rows(tmp_path: Path) -> None:
    """In the scored file's format, or in the one that is named; never as a TREC run."""
    table, options = graded(tmp_path / "scored.parquet"), ["--min-relevance", 2, "--num-negatives", 2]
    rows = mined(table, tmp_path / "expected.jsonl")
    done = run(table, *options, "-o", "-", "--output-format", "jsonl")
    assert [json.loads(line) for line in done.stdout.splitlines()] == rows
    assert "queries are on standard output" in done.stderr
    done = run(table, *options, "-o", "-")
    assert pq.read_table(pa.BufferReader(done.stdout_bytes)).to_pylist() == rows
    refused = run(table, "-o", "-", "--output-format", "trec")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "-: training data is not a TREC run; name a .parquet" in refused.stderr


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "csv.gz"])
def test_every_table_is_mined_alike(tmp_path: Path, ending: str) -> None:
    """As evaluate reads them; a row without a score is no negative, and a missing label no judgement."""
    rows = pq.read_table(graded(tmp_path / "scored.parquet")).to_pylist()
    rows[3]["score"] = None  # d of q1
    table = pa.Table.from_pylist(rows).rename_columns({"doc_id": "docno", "score": "logit"})
    path = tmp_path / f"scored.{ending}"
    writer = OutputFormat().writer(path, path, table.schema, "logit")
    writer.write(table)
    writer.close({})
    options = ["--score-column", "logit", "--format", "msmarco"]
    found = mined(path, tmp_path / "out.jsonl", *options)
    pq.write_table(table, tmp_path / "renamed.parquet")
    assert found == mined(tmp_path / "renamed.parquet", tmp_path / "expected.jsonl", *options)
    assert [tuple(row.values()) for row in found[:2]] == [("q1", "a", "e"), ("q1", "c", "e")]
    texts = mined(path, tmp_path / "texts.jsonl", "--score-column", "logit", "--format", "triplet")
    assert texts[0] == {"anchor": "q1", "positive": "a", "negative": "e"}


def test_a_run_is_mined_with_its_judgements_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.trec").write_text("q Q0 a 1 3.5 x\nq Q0 b 2 2.5 x\nr Q0 a 1 1 x\n")
    Path("qrels.txt").write_text("q 0 b 1\nr 0 c 1\n")
    Path("queries.tsv").write_text("q\tthe query\nr\tanother\n")
    Path("corpus.jsonl").write_text('{"_id": "a", "text": "first"}\n{"_id": "b", "text": "second"}\n')
    texts = ["--queries", "queries.tsv", "--corpus", "corpus.jsonl"]
    done = run("run.trec", "--qrels", "qrels.txt", *texts, "-o", "out.jsonl")
    assert done.exit_code == 0, done.output
    assert Path("out.jsonl").read_text() == (
        '{"anchor": "the query", "positive": "second", "negative": "first"}\n'
    )
    assert "1 rows from 1 of 2 queries" in done.output
    assert "corpus: id '_id', text 'text'" in done.output
    Path("words.jsonl").write_text('{"_id": "a", "words": "first"}\n{"_id": "b", "words": "second"}\n')
    named = ["--qrels", "qrels.txt", *texts[:3], "words.jsonl", "--corpus-text", "words"]
    assert run("run.trec", *named, "-o", "same.jsonl").exit_code == 0
    assert Path("same.jsonl").read_text() == Path("out.jsonl").read_text()
    done = run("run.trec", "--qrels", "qrels.txt", "--format", "msmarco", "-o", "ids.tsv")
    assert Path("ids.tsv").read_text() == "q\tb\ta\n", done.output  # ids need no texts
    for options, message in [
        (texts, "no column 'relevance'; name the judgements with --qrels"),
        (["--qrels", "qrels.txt"], "a run has no texts; name --queries and --corpus"),
        (["--qrels", "qrels.txt", *texts[:2]], "--queries and --corpus belong together"),
        (["--qrels", "qrels.txt", "--corpus-text", "words"], "--on-duplicate need --queries and --corpus"),
        (["--qrels", "qrels.txt", "--on-duplicate", "last"], "--on-duplicate need --queries and --corpus"),
        (["--qrels", "qrels.txt", *texts, "--score-column", "ours"], "run.trec: no column 'ours'"),
        (["--qrels", "qrels.txt", *texts[:3], "words.jsonl"], "Name it with --corpus-text"),
        (["--qrels", "qrels.txt", *texts[:3], "queries.tsv"], "no text for doc_id 'a' in --corpus"),
    ]:
        done = run("run.trec", *options, "-o", "none.jsonl")
        assert (done.exit_code, message in done.stderr) == (2, True), done.output
    Path("run.trec").write_text("q a\nq b\n")
    done = run("run.trec", "--qrels", "qrels.txt", *texts, "-o", "none.jsonl")
    assert "the run has no scores, by which negatives are chosen" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "with_scores", "loss"),
    [
        ("triplet", False, losses.MultipleNegativesRankingLoss),
        ("n-tuple", False, losses.CachedMultipleNegativesRankingLoss),
        ("labeled-pair", False, losses.BinaryCrossEntropyLoss),
        ("labeled-list", False, losses.LambdaLoss),
        ("triplet", True, losses.MarginMSELoss),
        ("n-tuple", True, losses.MarginMSELoss),
        ("labeled-pair", True, losses.MSELoss),
        ("labeled-list", True, losses.ListNetLoss),
    ],
)
def test_sentence_transformers_trains_on_it(
    scored: Path, tmp_path: Path, tiny_model: Path, form: str, with_scores: bool, loss: Callable[..., Any]
) -> None:
    """A step of its own trainer, with the loss that each form is for."""
    path = tmp_path / "train.parquet"
    options = ["--format", form, *(["--with-scores"] if with_scores else [])]
    assert run(scored, *options, "-o", path).exit_code == 0
    rows = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    model = CrossEncoder(str(tiny_model), num_labels=1, device="cpu")
    asked = CrossEncoderTrainingArguments(
        str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    done = CrossEncoderTrainer(model, asked, train_dataset=rows, loss=loss(model)).train()
    assert np.isfinite(done.training_loss)
