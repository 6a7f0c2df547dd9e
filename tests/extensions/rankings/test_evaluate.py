"""rankmill evaluate: the figures of ir-measures and pytrec_eval, before and after."""

from __future__ import annotations

import json
import random
import uuid
from pathlib import Path
from typing import Any

import ir_measures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval
import scipy.stats
from click.testing import CliRunner, Result

from rankmill.cli.main import rankmill
from rankmill.extensions.rankings.scored import read_rows
from rankmill.producer.files.outputs import OutputFormat

RANDOM = random.Random(7)
QUERIES = [f"q{n}" for n in range(6)]
QRELS = {query: {f"d{n}": RANDOM.randrange(3) for n in range(0, 30, 3)} for query in QUERIES}
ROWS: list[dict[str, Any]] = [
    {
        "query_id": query,
        "doc_id": f"d{n}",
        "run_rank": rank,
        "run_score": 30.0 - rank,
        "score": RANDOM.random(),
    }
    for query in QUERIES[:-1]
    for rank, n in enumerate(RANDOM.sample(range(30), 20), 1)
]


def test_ids_of_a_scored_table_may_be_uuids(tmp_path: Path) -> None:
    ids = pa.array([uuid.UUID(int=1).bytes], pa.binary(16)).cast(pa.uuid())
    pq.write_table(pa.table({"qid": ids, "docid": ids, "score": [0.5]}), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet", "score")["doc_id"].tolist() == [str(uuid.UUID(int=1))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "out.parquet")
    lines = (f"{query} 0 {doc} {rel}\n" for query, found in QRELS.items() for doc, rel in found.items())
    (tmp_path / "qrels.txt").write_text("".join(lines))
    lines = (f"{query}\t{doc}\t{rel}\n" for query, found in QRELS.items() for doc, rel in found.items())
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(rankmill, ["evaluate", *map(str, arguments)])


def expected(key: str, measure: str, sign: int = 1) -> dict[str, float]:
    """pytrec_eval's own values, 0 for the query that the ranking lacks."""
    ranking: dict[str, dict[str, float]] = {}
    for row in ROWS:
        ranking.setdefault(str(row["query_id"]), {})[str(row["doc_id"])] = sign * float(row[key])
    found = pytrec_eval.RelevanceEvaluator(QRELS, {measure}).evaluate(ranking)
    (name,) = {name for values in found.values() for name in values}
    return {query: found.get(query, {}).get(name, 0.0) for query in QUERIES}


@pytest.mark.parametrize("qrels", ["qrels.txt", "qrels.tsv"])
def test_the_figures_are_those_of_pytrec_eval(folder: Path, qrels: str) -> None:
    done = run(folder / "out.parquet", "--qrels", folder / qrels, "--json", "--measures", "nDCG@10,R@10")
    assert done.exit_code == 0, done.output
    for found, measure in zip(json.loads(done.stdout), ("ndcg_cut.10", "recall.10"), strict=True):
        new, old = expected("score", measure), expected("run_rank", measure, -1)
        assert found["by_query"] == {query: pytest.approx([old[query], new[query]]) for query in QUERIES}
        assert found["after"] == pytest.approx(sum(new.values()) / 6)
        assert found["before"] == pytest.approx(sum(old.values()) / 6)
        assert found["better"] == sum(new[query] > old[query] for query in QUERIES)


def test_passages_that_were_added_for_mining_do_not_count(folder: Path) -> None:
    plain = run(folder / "out.parquet", "--qrels", folder / "qrels.txt", "--json")
    added = [
        {**ROWS[0], "doc_id": f"d{n}", "score": 2.0, "in_run": False if n else None} for n in range(0, 30, 3)
    ]
    pq.write_table(
        pa.Table.from_pylist([{**row, "in_run": True} for row in ROWS] + added), folder / "more.parquet"
    )
    assert run(folder / "more.parquet", "--qrels", folder / "qrels.txt", "--json").stdout == plain.stdout


def test_a_trec_run_is_measured_as_ir_measures_does(folder: Path) -> None:
    lines = [f"{row['query_id']} Q0 {row['doc_id']} 1 {row['score']!r} t\n" for row in ROWS]
    (folder / "out.trec").write_text("".join(lines))
    done = run(folder / "out.trec", "--qrels", folder / "qrels.txt", "--json", "--measures", "RR@10")
    measure = ir_measures.RR @ 10
    qrels = list(ir_measures.read_trec_qrels(str(folder / "qrels.txt")))
    ranking = list(ir_measures.read_trec_run(str(folder / "out.trec")))
    (found,) = json.loads(done.stdout)
    assert found["after"] == pytest.approx(ir_measures.calc_aggregate([measure], qrels, ranking)[measure])
    assert found["before"] is None
    compared = run(
        folder / "out.parquet", "--run", folder / "out.trec", "--qrels", folder / "qrels.txt", "--json"
    )
    assert all(each["before"] == pytest.approx(each["after"]) for each in json.loads(compared.stdout))


@pytest.mark.parametrize("ranks", ["0", "the other way", "none"])
def test_before_is_by_the_scores_of_the_run_whatever_its_ranks_say(folder: Path, ranks: str) -> None:
    """As trec_eval has it, also for equal scores: of these the passage with the larger id is first."""
    rows: list[dict[str, Any]] = [{**row, "run_score": float(row["run_rank"] // 3)} for row in ROWS]
    for row in rows:
        row["run_rank"] = {"0": 0, "the other way": 30 - row["run_rank"], "none": None}[ranks]
    schema = pa.schema({"query_id": "string", "doc_id": "string", "run_rank": "int64", "run_score": "float64",
                        "score": "float64"})  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "ranks.parquet")
    lines = [
        f"{row['query_id']} Q0 {row['doc_id']} {row['run_rank'] or 0} {row['run_score']} t\n" for row in rows
    ]
    (folder / "run.trec").write_text("".join(lines))
    run_scores: dict[str, dict[str, float]] = {}
    for row in rows:
        run_scores.setdefault(row["query_id"], {})[row["doc_id"]] = row["run_score"]
    found = pytrec_eval.RelevanceEvaluator(QRELS, {"ndcg_cut.10"}).evaluate(run_scores)
    expected = sum(values["ndcg_cut_10"] for values in found.values()) / 6
    options = ["--qrels", folder / "qrels.txt", "--measures", "nDCG@10", "--json"]
    (table,) = json.loads(run(folder / "ranks.parquet", *options).stdout)
    (trec,) = json.loads(run(folder / "run.trec", *options).stdout)
    assert table["before"] == pytest.approx(expected) == pytest.approx(trec["after"])


@pytest.mark.parametrize("column", ["rank", "place"])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_what_top_k_has_cut_is_not_compared_with_its_own_rows(folder: Path, column: str, ending: str) -> None:
    """The run's scores of the best passages after reranking say nothing about the run before."""
    by_query = {query: [row for row in ROWS if row["query_id"] == query] for query in QUERIES}
    best = [sorted(rows, key=lambda row: -float(row["score"]))[:5] for rows in by_query.values()]
    kept = [{**row, column: place} for rows in best for place, row in enumerate(rows, 1)]
    cut, whole = folder / f"cut.{ending}", folder / "out.parquet"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(kept), cut)
    else:
        cut.write_text("".join(json.dumps(row) + "\n" for row in kept))
    options = ["--qrels", folder / "qrels.txt", "--measures", "nDCG@5", "--json"]
    done = run(cut, *options)
    (found,), (expected,) = json.loads(done.stdout), json.loads(run(whole, *options).stdout)
    assert (found["after"], found["before"], found["p_value"]) == (expected["after"], None, None)
    assert "name the run to compare with: --run RUN" in done.stderr
    lines = [f"{row['query_id']} Q0 {row['doc_id']} 1 {row['run_score']} t\n" for row in ROWS]
    (folder / "run.trec").write_text("".join(lines))
    done = run(cut, *options, "--run", folder / "run.trec")
    assert json.loads(done.stdout) == [expected]
    assert "name the run" not in done.stderr


def test_equal_scores_are_ordered_as_trec_eval_orders_them(folder: Path) -> None:
    """For each measure: ir-measures takes RR and RR@10 from libraries that order equal scores in two ways."""
    rows = [{"query_id": "q", "doc_id": f"d{n}", "run_score": 1.0, "score": 0.5} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "out.parquet")
    (folder / "qrels.txt").write_text("q 0 d2 1\n")
    measures = "RR,RR@10,Success@1,P@2"
    done = run(folder / "out.parquet", "--qrels", folder / "qrels.txt", "--json", "--measures", measures)
    assert done.exit_code == 0, done.output
    # d3 comes first, then d2: the larger id
    expected_values = [0.5, 0.5, 0.0, 0.5]
    assert [found["after"] for found in json.loads(done.stdout)] == expected_values
    assert [found["before"] for found in json.loads(done.stdout)] == expected_values


def test_a_query_with_negative_grades_only_has_no_relevant_passage(folder: Path) -> None:
    """pytrec_eval crashes on it beside other queries."""
    judged = (folder / "qrels.txt").read_text()
    results = []
    for grade in (0, -2):
        (folder / "qrels.txt").write_text(f"{judged}qx 0 d1 {grade}\n")
        done = run(folder / "out.parquet", "--qrels", folder / "qrels.txt", "--measures", "nDCG,AP", "--json")
        results.append(json.loads(done.stdout))
    assert results[0] == results[1]
    assert results[0][0]["by_query"]["qx"] == [0, 0]


def test_the_scores_are_those_that_the_file_says_it_got(folder: Path) -> None:
    """An input may have a column of scores; its name, score, is not that of the new ones then."""
    rows = [{**row, "score": -float(row["score"]), "ours": row["score"]} for row in ROWS]
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"rankmill.score_column": "ours"})
    pq.write_table(table, folder / "named.parquet")
    options = ["--qrels", folder / "qrels.txt", "--json"]
    plain = run(folder / "out.parquet", *options)
    assert run(folder / "named.parquet", *options).stdout == plain.stdout
    asked = run(folder / "named.parquet", *options, "--score-column", "score")
    assert json.loads(asked.stdout)[0]["after"] != json.loads(plain.stdout)[0]["after"]
    compared = run(folder / "out.parquet", "--run", folder / "named.parquet", *options)
    assert all(each["before"] == each["after"] for each in json.loads(compared.stdout))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "arrow"])
def test_a_score_of_the_input_is_not_taken_for_the_new_one(folder: Path, ending: str) -> None:
    """Only the metadata of Parquet name the column of scores; the wrong one gave wrong figures."""
    rows = [{**row, "score": -float(row["score"]), "ours": row["score"]} for row in ROWS]
    table, path = pa.Table.from_pylist(rows), folder / f"out.{ending}"
    writer = OutputFormat().writer(path, path, table.schema, "ours")
    writer.write(table)
    writer.close({})
    options = ["--qrels", folder / "qrels.txt", "--json"]
    refused = run(path, *options)
    assert (refused.exit_code, refused.stdout) == (2, "")
    said = "column 'ours', which holds numbers too, follows column 'score': name the one with the new scores"
    assert said in refused.stderr
    plain = run(folder / "out.parquet", *options)
    assert run(path, *options, "--score-column", "ours").stdout == plain.stdout


def test_passages_that_were_added_to_the_other_output_do_not_count(folder: Path) -> None:
    added = [{**ROWS[0], "doc_id": f"d{n}", "score": 2.0, "in_run": False} for n in range(0, 30, 3)]
    rows = [{**row, "in_run": True} for row in ROWS]
    lines = "".join(json.dumps(row) + "\n" for row in [*rows, *added] if row not in rows[:1])
    (folder / "more.jsonl").write_text(lines)
    (folder / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    found = [
        run(folder / "out.parquet", "--run", folder / name, "--qrels", folder / "qrels.txt", "--json").stdout
        for name in ("more.jsonl", "plain.jsonl")
    ]
    assert found[0] == found[1]
    assert json.loads(found[0])[0]["before"] is not None


def test_measures_that_count_are_sums_as_in_ir_measures(folder: Path) -> None:
    lines = [f"{row['query_id']} Q0 {row['doc_id']} 1 {row['score']!r} t\n" for row in ROWS]
    (folder / "out.trec").write_text("".join(lines))
    names = ["NumRet", "NumRet(rel=2)", "AP(rel=2)"]
    options = ["--qrels", folder / "qrels.txt", "--json", "--measures", ",".join(names)]
    measures = [ir_measures.parse_measure(name) for name in names]
    qrels = list(ir_measures.read_trec_qrels(str(folder / "qrels.txt")))
    ranking = list(ir_measures.read_trec_run(str(folder / "out.trec")))
    expected = ir_measures.calc_aggregate(measures, qrels, ranking)
    for name in ("out.trec", "out.parquet"):
        found = [result["after"] for result in json.loads(run(folder / name, *options).stdout)]
        assert found == pytest.approx([expected[measure] for measure in measures])


def test_a_table_has_the_means_of_all_and_of_ranked_queries(folder: Path) -> None:
    done = run(folder / "out.parquet", "--qrels", folder / "qrels.txt")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["before", "after", "change", "p", "queries", "better,", "worse"]
    assert lines[4] == "of the 5 of 6 judged queries that are ranked:"
    assert [line.split()[0] for line in lines[1:4]] == [line.split()[0] for line in lines[5:8]]
    assert all(
        float(line.split()[2]) > float(every.split()[2])
        for line, every in zip(lines[5:8], lines[1:4], strict=True)
    )
    assert "1 of 6 judged queries are not in the ranking; they count as 0" in done.stderr


def test_the_p_value_is_that_of_the_paired_t_test(
    folder: Path,
) -> None:
    done = run(
        folder / "out.parquet", "--qrels", folder / "qrels.txt", "--json", "--measures", "nDCG@10,R@10"
    )
    for found, measure in zip(json.loads(done.stdout), ("ndcg_cut.10", "recall.10"), strict=True):
        new, old = expected("score", measure), expected("run_rank", measure, -1)
        paired = scipy.stats.ttest_rel([*new.values()], [*old.values()])
        assert found["p_value"] == pytest.approx(paired.pvalue)
        assert (found["judged"], found["ranked"]) == (6, 5)
        assert found["after_ranked"] == pytest.approx(sum(new.values()) / 5)
        assert found["before_ranked"] == pytest.approx(sum(old.values()) / 5)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:20]])
def test_a_test_that_says_nothing_has_no_p_value(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Nothing has changed, also of one query."""
    same = pa.Table.from_pylist([{**row, "score": row["run_score"]} for row in rows])
    pq.write_table(same, folder / "same.parquet")
    qrels = folder / "qrels.txt"
    if rows != ROWS:
        qrels.write_text(
            "".join(line for line in qrels.read_text().splitlines(True) if line.startswith("q0 "))
        )
    done = run(folder / "same.parquet", "--qrels", qrels, "--json")
    assert [each["p_value"] for each in json.loads(done.stdout)] == [None] * 3
    assert run(folder / "same.parquet", "--qrels", qrels).stdout.splitlines()[1].split()[4] == "-"


def test_a_part_is_compared_with_the_same_queries_of_the_whole_run(folder: Path) -> None:
    """As after --limit: the queries that were not scored say nothing about the reranker."""
    pq.write_table(pa.Table.from_pylist(ROWS[:40]), folder / "part.parquet")
    lines = [f"{row['query_id']} Q0 {row['doc_id']} 1 {row['run_score']!r} t\n" for row in ROWS]
    (folder / "whole.trec").write_text("".join(lines))
    done = run(
        folder / "part.parquet", "--run", folder / "whole.trec", "--qrels", folder / "qrels.txt", "--json"
    )
    old = expected("run_rank", "ndcg_cut.10", -1)
    found = json.loads(done.stdout)[0]
    assert found["ranked"] == 2
    assert found["before_ranked"] == pytest.approx((old["q0"] + old["q1"]) / 2)
    assert found["after_ranked"] == pytest.approx(3 * found["after"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["out.parquet", "--qrels", "qrels.txt", "--measures", "good@1"],
            "'good@1' is not a measure of ir-measures",
        ),
        (
            ["out.parquet", "--qrels", "qrels.txt", "--measures", "nDCG@0"],
            "'nDCG@0' is not a measure of ir-measures",
        ),
        (
            ["out.parquet", "--qrels", "qrels.txt", "--measures", "nDCG(cut=3)@10"],
            "'nDCG(cut=3)@10' is not a measure of ir-measures",
        ),
        (["out.parquet", "--qrels", "qrels.txt", "--measures", ","], "name a measure, such as nDCG@10"),
        (
            ["out.parquet", "--qrels", "qrels.txt", "--measures", "P"],
            "cannot compute P: invalid param cutoff, which is missing",
        ),
        (["out.parquet", "--qrels", "qrels.txt", "--measures", "StRecall"], "cannot compute StRecall"),
        (["out.parquet", "--qrels", "none.txt"], "none.txt: no such file"),
        (["out.parquet", "--qrels", "bad.txt"], "bad.txt, line 2: relevance is 'x', not a whole number"),
        (["out.parquet", "--qrels", "null.txt"], "null.txt: a row lacks relevance"),
        (["out.parquet", "--qrels", "short.txt"], "short.txt, line 1: 2 fields; judgements have four"),
        (["out.parquet", "--qrels", "unlike.txt"], "unlike.txt: query 'q0' has passage 'd0' twice; keep one"),
        (["out.parquet", "--qrels", "part.csv"], "row 1 (counted from 0): score is 1.5, not a whole number"),
        (["out.parquet", "--qrels", "less.csv"], "less.csv: a row lacks query_id or doc_id or score"),
        (["twice.trec", "--qrels", "qrels.txt"], "twice.trec: query 'q0' has passage 'd0' twice; keep one"),
        (["twice.parquet", "--qrels", "qrels.txt"], "twice.parquet: query 'q0' has passage "),
        (
            ["out.parquet", "--qrels", "qrels.txt", "--run", "twice.trec"],
            "twice.trec: query 'q0' has passage",
        ),
        (["out.parquet", "--qrels", "other.txt"], "no query of the ranking has a judgement"),
        (
            ["out.parquet", "--qrels", "qrels.txt", "--score-column", "s"],
            "no column 's'; name it with --score-column",
        ),
        (["out.tsv", "--qrels", "qrels.txt", "--score-column", "s"], "no column 's'; for a run, leave out"),
    ],
)
def test_what_cannot_be_measured(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "bad.txt").write_text("q0 0 d0 1\nq0 0 d1 x\n")
    (folder / "short.txt").write_text("q0 d0\n")
    (folder / "null.txt").write_text("q0 0 d0 1\nq0 0 d1 NA\n")
    (folder / "unlike.txt").write_text("q0 0 d0 1\nq0 0 d1 1\nq0 0 d1 1\nq0 0 d0 2\n")
    (folder / "part.csv").write_text("query_id,doc_id,score\nq0,d0,1\nq0,d1,1.5\n")
    (folder / "less.csv").write_text("query_id,doc_id,score\nq0,d0,1\nq0,d1,\n")
    (folder / "twice.trec").write_text("q0 Q0 d0 1 2.0 t\nq0 Q0 d1 2 1.0 t\nq0 Q0 d0 3 0.0 t\n")
    pq.write_table(pa.Table.from_pylist([*ROWS, ROWS[0]]), folder / "twice.parquet")
    pa.Table.from_pylist(ROWS).to_pandas().to_csv(folder / "out.tsv", sep="\t", index=False)
    (folder / "other.txt").write_text("1 0 d0 1\n")
    found = [str(folder / each) if "." in each else each for each in arguments]
    done = run(*found)
    assert done.exit_code == 2
    assert message in done.stderr
