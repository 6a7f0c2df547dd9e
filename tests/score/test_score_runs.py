"""score-file on a run with queries and corpus, as docs/guides/rerank-a-run.md shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from rankmill.cli.main import rankmill
from rankmill.cli.score import score_file as score_file_command
from rankmill.producer.files.stores.paths import INDEX
from tests.conftest import Outcome, Server, run_command, score_file

QUERIES = {"q1": "how far is the moon", "q2": "big cat"}
CORPUS = {f"d{n}": f"moon river {'big ' * (n % 5)}{n}" for n in range(30)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = (json.dumps({"_id": key, "text": text}) + "\n" for key, text in QUERIES.items())
    (tmp_path / "queries.jsonl").write_text("".join(lines))
    lines = (json.dumps({"_id": key, "title": "T", "text": text}) + "\n" for key, text in CORPUS.items())
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    run = [f"{query} Q0 d{n} {n + 1} {30 - n} bm25\n" for query in QUERIES for n in range(30)]
    (tmp_path / "bm25.trec").write_text("".join(run))
    return tmp_path


@pytest.fixture
def command(folder: Path, shared_queue: Server, tiny_model: Path) -> list[object]:
    files = [
        "--run",
        folder / "bm25.trec",
        "--queries",
        folder / "queries.jsonl",
        "--corpus",
        folder / "corpus.jsonl",
    ]
    return [
        *files,
        "--redis",
        shared_queue.url,
        "--model",
        tiny_model,
        "--precision",
        "fp32",
        "--chunk-size",
        16,
    ]


def test_a_bm25_run_is_reranked(folder: Path, command: list[object]) -> None:
    done = score_file(*command, "--depth", 20, "--with-texts", "-o", folder / "out.parquet")
    assert done.code == 0, done.err
    table = pq.read_table(folder / "out.parquet")
    assert table["passage"].to_pylist() == [f"T {CORPUS[key]}" for key in table["doc_id"].to_pylist()]
    assert table["query"].to_pylist() == [QUERIES[key] for key in table["query_id"].to_pylist()]
    assert table["run_rank"].to_pylist() == [*range(1, 21)] * 2
    pairs = folder / "pairs.parquet"
    pq.write_table(pa.table({name: table[name].cast(pa.string()) for name in ("query", "passage")}), pairs)
    assert score_file(pairs, *command[6:]).code == 0
    scores = pq.read_table(folder / "pairs.scored.parquet")["score"].to_pylist()
    assert table["score"].to_pylist() == pytest.approx(scores, abs=1e-5)
    assert (folder / f"corpus.jsonl{INDEX}").is_dir()

    done = score_file(*command, "--depth", 20, "-o", folder / "out.trec", "--tag", "mine")
    assert done.code == 0, done.err
    lines = [line.split() for line in (folder / "out.trec").read_text().splitlines()]
    assert [line[0] for line in lines] == ["q1"] * 20 + ["q2"] * 20
    assert [int(line[3]) for line in lines] == [*range(1, 21)] * 2
    assert {line[5] for line in lines} == {"mine"}
    by_id = dict(
        zip(zip(table["query_id"].to_pylist(), table["doc_id"].to_pylist(), strict=True), scores, strict=True)
    )
    assert [float(line[4]) for line in lines] == pytest.approx(
        [by_id[line[0], line[2]] for line in lines], abs=1e-5
    )
    assert [float(line[4]) for line in lines[:20]] == sorted(
        (float(line[4]) for line in lines[:20]), reverse=True
    )


def test_labels_from_two_teachers_then_negatives_and_measures(folder: Path, command: list[object]) -> None:
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td7\t1\nq2\td25\t1\n")
    common = [*command, "--qrels", folder / "qrels.tsv", "--depth", 10, "--with-texts"]
    assert score_file(*common, "-o", folder / "scored.parquet").code == 0
    done = score_file(
        folder / "scored.parquet", *command[6:], "--score-column", "second", "-o", folder / "both.parquet"
    )
    assert done.code == 0, done.err
    both = pq.read_table(folder / "both.parquet")
    assert len(both) == 21  # d25 is not among the first ten
    assert both["second"].to_pylist() == pytest.approx(both["score"].to_pylist(), abs=1e-5)  # the same model
    added = both.filter(pc.invert(both["in_run"]))
    assert added.select(["query_id", "doc_id", "relevance"]).to_pylist() == [
        {"query_id": "q2", "doc_id": "d25", "relevance": 1}
    ]
    mined = run("mine", folder / "scored.parquet", "--num-negatives", 2, "-o", folder / "negatives.parquet")
    assert mined.exit_code == 0, mined.output
    rows = pq.read_table(folder / "negatives.parquet").to_pylist()
    assert len(rows) == 4
    assert {row["positive"] for row in rows} == {f"T {CORPUS[key]}" for key in ("d7", "d25")}
    assert not {row["negative"] for row in rows} & {row["positive"] for row in rows}
    measured = run("evaluate", folder / "scored.parquet", "--qrels", folder / "qrels.tsv", "--json")
    assert measured.exit_code == 0, measured.output
    recall = {each["measure"]: each["after"] for each in json.loads(measured.stdout)}["R@100"]
    assert recall == 0.5  # the passage that was added for mining does not count


def test_the_columns_of_texts_are_named_or_known_and_the_summary_says_them(
    folder: Path, command: list[object]
) -> None:
    corpus = [{"docid": key, "title": "T", "words": text, "pid": f"p{key}"} for key, text in CORPUS.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    output = folder / "out.parquet"
    done = score_file(*command, "-o", output)
    assert (done.code, "--corpus-id" in done.err, output.exists()) == (2, True, False), done.err
    done = score_file(*command, "--corpus-id", "docid", "-o", output)
    assert (done.code, "--corpus-text" in done.err, output.exists()) == (2, True, False), done.err
    named = ["--corpus-id", "docid", "--with-texts", "-o", output, "--corpus-text"]
    done = score_file(*command, *named, "words")
    assert done.code == 0, done.err
    assert "queries: id '_id', text 'text'" in done.out
    assert "corpus: id 'docid', text 'words'" in done.out
    table = pq.read_table(output)
    assert table["passage"].to_pylist() == [CORPUS[key] for key in table["doc_id"].to_pylist()]
    done = score_file(*command, *named, "title,words", "--force", "--json")
    assert (
        json.loads(done.out)["taken"]["corpus"]
        == "id 'docid', text 'words' behind 'title', where there is one"
    )
    table = pq.read_table(output)
    assert table["passage"].to_pylist() == [f"T {CORPUS[key]}" for key in table["doc_id"].to_pylist()]


@pytest.mark.parametrize(
    ("two", "options", "named"),
    [
        (("query_id", "qid"), ["--top-k", 1], ["--query-id-column", "query_id"]),
        (("pid", "docid"), ["--output-format", "trec"], ["--passage-id-column", "docid"]),
    ],
)
def test_ids_of_which_two_could_be_meant_are_asked_about(
    folder: Path, command: list[object], two: tuple[str, str], options: list[object], named: list[object]
) -> None:
    one = {"query_id", "pid"} - set(two)
    rows = [
        {
            **dict.fromkeys(one, "x"),
            two[0]: f"{n // 3}",
            two[1]: f"{n}",
            "query": "moon",
            "passage": f"river {n}",
        }
        for n in range(6)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    pairs = [folder / "pairs.parquet", *command[6:], *options, "-o", folder / "out"]
    pairs += [] if "trec" in options else ["--output-format", "jsonl"]
    done = score_file(*pairs)
    assert (done.code, f"{two[0]!r} or {two[1]!r}: name it with {named[0]}" in done.err) == (2, True), (
        done.err
    )
    done = score_file(*pairs, *named)
    assert done.code == 0, done.err
    lines = (folder / "out").read_text().splitlines()
    assert len(lines) == (2 if "--top-k" in options else 6)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(rankmill, [*map(str, arguments)])


def test_what_is_missing_is_a_row_error_with_its_name(folder: Path, command: list[object]) -> None:
    run = folder / "bm25.trec"
    run.write_text("q1 Q0 d1 1 2 t\nq1 Q0 gone 2 1 t\nq9 Q0 d1 1 1 t\n")
    done = score_file(*command, "-o", folder / "out.parquet")
    assert done.code == 3
    assert pq.read_table(folder / "out.parquet").column_names == [
        "query_id",
        "doc_id",
        "run_rank",
        "run_score",
        "score",
    ]
    errors = [json.loads(line) for line in (folder / "out.parquet.errors.jsonl").read_text().splitlines()]
    assert [(each["row"], each["error"].split(" in /")[0]) for each in errors] == [
        (1, "no text for doc_id 'gone'"),
        (2, "no text for query_id 'q9'"),
    ]
    again = score_file(*command, "-o", folder / "other.parquet", "--on-null", "fail")
    assert (again.code, "query_id 'q9' is not in" in again.err) == (2, True)


def test_a_passage_that_a_query_has_twice_is_named(folder: Path, command: list[object]) -> None:
    run = folder / "bm25.trec"
    run.write_text(run.read_text() + "q1 Q0 d7 31 0.5 bm25\n")
    done = score_file(*command, "-o", folder / "out.parquet")
    assert (done.code, "bm25.trec: query 'q1' has passage 'd7' twice" in done.err) == (2, True), done.err
    rows = [{"query_id": 1, "doc_id": n % 3, "query": "q", "passage": "p"} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    done = score_file(folder / "pairs.parquet", *command[6:], "-o", folder / "out.trec")
    assert (done.code, "query '1' has passage '0' twice" in done.err) == (2, True), done.err
    assert not list(folder.glob("out.*"))


def test_a_limit_takes_the_first_rows_of_a_run(folder: Path, command: list[object]) -> None:
    (folder / "qrels.txt").write_text("q1 0 d7 1\nq1 0 d9 1\nq2 0 d1 1\n")
    every = score_file(*command, "-o", folder / "all.parquet")
    assert every.code == 0, every.err
    rows = pq.read_table(folder / "all.parquet").to_pylist()

    def limited(*options: object) -> list[dict[str, object]]:
        done = score_file(*command, *options, "--force", "-o", folder / "out.parquet")
        assert done.code == 0, done.err
        return list(pq.read_table(folder / "out.parquet").to_pylist())

    found = limited("--limit", 8)
    assert found == [{**row, "score": pytest.approx(row["score"], abs=1e-5)} for row in rows[:8]]
    shards = [limited("--limit", 8, "--shard", shard) for shard in ("1/2", "2/2")]
    assert [row["doc_id"] for rows in shards for row in rows] == [row["doc_id"] for row in rows[:8]]
    assert [row["doc_id"] for row in limited("--limit", 8, "--depth", 3)] == [f"d{n % 3}" for n in range(6)]
    judged = limited("--limit", 8, "--qrels", folder / "qrels.txt")
    assert [(row["doc_id"], row["in_run"]) for row in judged[7:]] == [("d7", True), ("d9", False)]


def test_judged_passages_are_no_part_of_a_ranking(folder: Path, command: list[object]) -> None:
    (folder / "qrels.txt").write_text("q1 0 d7 1\n")
    done = score_file(*command, "--qrels", folder / "qrels.txt", "-o", folder / "out.trec")
    assert (done.code, "--qrels adds passages that are not in the run" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "a.trec"], "--run, --queries and --corpus belong together"),
        (
            ["a.csv", "--run", "a", "--queries", "b", "--corpus", "c"],
            "give either INPUT files of pairs or --run",
        ),
        ([], "no INPUT: give files of pairs, or --run"),
        (["--run", "nowhere.trec", "--queries", "b", "--corpus", "c"], "nowhere.trec: no such file (--run)"),
        (["--dataset", "tiny"], "'tiny' is not a dataset of ir_datasets, such as irds:beir/scifact/test"),
        (["--dataset", "irds:nothing", "-o", "a.trec"], "irds:nothing: ir_datasets has no such dataset"),
    ],
)
def test_files_that_do_not_belong_together(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(score_file_command, arguments)
    assert done.exit_code == 2
    assert message in done.stderr


DATASET = """
import sys, ir_datasets as d
from ir_datasets.formats import BaseScoredDocs, GenericScoredDoc
queries, corpus, qrels = sys.argv[1:4]
plain = d.create_dataset(docs_tsv=corpus, queries_tsv=queries, qrels_trec=qrels)
d.registry.register("tiny", plain)
class Found(BaseScoredDocs):
    def scoreddocs_iter(self):
        return iter([GenericScoredDoc("q2", f"d{n}", 1.0 - n) for n in range(2)])
d.registry.register("tiny/top2", d.datasets.base.Dataset(Found(), plain))
sys.argv[1:4] = []
"""
"""Datasets that ir_datasets knows in this process: texts and judgements, and a run of two passages."""


def test_a_dataset_has_queries_passages_judgements_and_perhaps_a_run(
    folder: Path, command: list[object]
) -> None:
    files = [folder / name for name in ("queries.tsv", "corpus.tsv", "qrels.txt")]
    for file, texts in zip(files, (QUERIES, CORPUS), strict=False):
        file.write_text("".join(f"{key}\t{text}\n" for key, text in texts.items()))
    files[2].write_text("q2 0 d1 1\n")
    home = {"XDG_CACHE_HOME": str(folder / "cache"), "IR_DATASETS_HOME": str(folder / "irds")}

    def run(code: str, *arguments: object) -> Outcome:
        return run_command("python", "-c", f"{DATASET}{code}", *files, *arguments, environ=home)

    def score(*arguments: object) -> Outcome:
        return run("from rankmill.cli.score import score_file; score_file()", *arguments, *command[6:])

    out = folder / "out.parquet"
    tiny = ["--dataset", "irds:tiny", "--run", folder / "bm25.trec"]
    done = score(*tiny, "--qrels", "irds:tiny", "--depth", 3, "--with-texts", "-o", out)
    assert done.code == 0, done.err
    rows = pq.read_table(out).to_pylist()
    assert [(row["query"], row["passage"]) for row in rows] == [
        (QUERIES[q], CORPUS[f"d{n}"]) for q in ("q1", "q2") for n in range(3)
    ]
    assert [row["relevance"] for row in rows] == [None, None, None, None, 1, None]

    files[1].unlink()  # what was read of a dataset is kept, also for the parts of it
    done = score("--dataset", "irds:tiny/top2", "-o", folder / "out.trec")
    assert done.code == 0, done.err
    assert {line.split()[2] for line in (folder / "out.trec").read_text().splitlines()} == {"d0", "d1"}
    evaluated = run("from rankmill.cli.main import rankmill; rankmill()", "evaluate", folder / "out.trec",
                    "--qrels", "irds:tiny", "--measures", "R@2", "--json")  # fmt: skip
    assert json.loads(evaluated.out)[0]["after"] == 1.0

    refused = score("--dataset", "irds:tiny", "-o", folder / "again.parquet")
    assert (refused.code, "irds:tiny has no run; name one with --run" in refused.err) == (2, True)
    (kept,) = (folder / "cache" / "rankmill" / "datasets").glob("*.docs.parquet")
    kept.unlink()
    refused = score(*tiny, "-o", folder / "again.parquet")
    (line,) = refused.err.strip().splitlines()
    assert (refused.code, "irds:tiny cannot be read by ir_datasets: " in line) == (2, True), line
