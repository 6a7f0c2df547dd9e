"""score-file --reuse: scores of an earlier output."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import Client
from rankmill.extensions.registry.documents import Alias, Reference, target_of
from rankmill.extensions.registry.registry import Registry
from tests.conftest import Outcome, Server, run_command, score_file
from tests.harness.models.registries import put_version
from tests.harness.models.tiny import cross_encoder, make_bert

pytestmark = pytest.mark.own_precision


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("model") / "a", hidden=128)


@pytest.fixture(scope="module")
def options(shared_queue: Server) -> list[object]:
    return ["--redis", shared_queue.url, "--chunk-size", 20]


def write(path: Path, numbers: list[int]) -> Path:
    texts = [None if n == 13 else f"moon {'river ' * (n % 4)}{n}" for n in numbers]
    pq.write_table(pa.table({"id": numbers, "query": ["q"] * len(numbers), "passage": texts}), path)
    return path


@pytest.fixture(scope="module")
def earlier(options: list[object], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with the numbers to 49, of which 13 has no score."""
    path = write(tmp_path_factory.mktemp("earlier") / "a.parquet", list(range(50)))
    assert score_file(path, *options, "--model", model, "--precision", "fp32").code == 3
    return path.with_name("a.scored.parquet")


NUMBERS = [*range(40, 60), *range(40), 60, 60, 61, 60, 62, *range(30)]
"""New are 50 to 62, and 13, which has no score."""


def change_the_middle(weights: Path) -> None:
    """Change a weight that is in neither the first nor the last 64 KiB."""
    data = bytearray(weights.read_bytes())
    assert len(data) > 1 << 20
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def submitted(done: Outcome) -> int:
    """Rows that were sent to workers."""
    return sum(int(rows) for rows in re.findall(r"submitted (\d+) rows", done.err))


@pytest.fixture(scope="module")
def expected(shared_queue: Server, model: Path, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The numbers with the scores of a client, which sends each pair as often as it is there."""
    table = pq.read_table(write(tmp_path_factory.mktemp("all") / "b.parquet", NUMBERS))
    with Client(shared_queue.url, precision="fp32") as client:
        scores = client.score(table, model=str(model), timeout=60)
    return table.append_column("score", pa.array(scores, pa.float32(), from_pandas=True))


def check(output: Path, expected: pa.Table) -> None:
    found = pq.read_table(output)
    assert found.drop_columns("score").equals(expected.drop_columns("score"))
    assert found["score"].to_pylist() == pytest.approx(expected["score"].to_pylist(), abs=1e-5)
    assert pq.read_metadata(output).metadata[b"rankmill.precision"] == b"fp32"


@pytest.mark.parametrize("way", [[], ["--rows-per-part", 40], ["--score-column", "score,b"]])
def test_a_pair_is_scored_once_for_all_rows_of_a_chunk(
    options: list[object], model: Path, expected: pa.Table, way: list[object], tmp_path: Path
) -> None:
    twice = [number for number in NUMBERS for _ in range(2)]
    source, output = write(tmp_path / "b.parquet", twice), tmp_path / "out.parquet"
    command = [source, *options, "--model", model, "--precision", "fp32", *way]
    models = 1
    if "score,b" in way:
        models = 2
        command += ["--model", make_bert(tmp_path / "b", seed=1)]
    if "--rows-per-part" in way:
        output = output.with_suffix("")
    done = score_file(*command, "-o", output, "-v")
    sent = sum(len(set(twice[first : first + 20])) for first in range(0, len(twice), 20))
    assert (done.code, submitted(done)) == (3, sent * models), done.err
    found = pq.read_table(output)
    assert found["id"].to_pylist() == twice
    assert found["score"][::2].to_pylist() == pytest.approx(expected["score"].to_pylist(), abs=1e-5)
    assert found["score"][1::2] == found["score"][::2]


def test_shards_and_all_outputs_of_repeated_pairs(
    options: list[object], tmp_path: Path, shared_queue: Server
) -> None:
    numbers = [number for number in range(30) for _ in range(2)]
    source, model = write(tmp_path / "b.parquet", numbers), str(make_bert(tmp_path / "m", labels=3))
    with Client(shared_queue.url, precision="fp32", activation="softmax", all_labels=True) as client:
        asked = client.score(pq.read_table(source), model=model, timeout=60)
    command = [
        source,
        *options,
        "--model",
        model,
        "--precision",
        "fp32",
        "--activation",
        "softmax",
        "--all-labels",
    ]
    done = score_file(*command, "--shard", "1/1", "-o", tmp_path / "out.parquet", "-v")
    assert (done.code, submitted(done)) == (3, 30 + 1), done.err  # 1: the pair that tells the labels
    found = pq.read_table(tmp_path / "out.parquet")
    scores = [found[f"score_LABEL_{number}"].to_pylist() for number in range(3)]
    rows = [[None if np.isnan(each) else each for each in row] for row in asked.tolist()]
    for mine, theirs in zip(zip(*scores, strict=True), rows, strict=True):
        assert list(mine) == pytest.approx(theirs, abs=1e-5)


def test_only_new_pairs_are_scored(
    options: list[object], model: Path, earlier: Path, expected: pa.Table, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "moved"
    shutil.copytree(model, elsewhere)  # the same files
    source = write(tmp_path / "b.parquet", NUMBERS)
    command = [source, *options, "--model", elsewhere, "--reuse", earlier]  # and the precision of the scores
    done = score_file(*command, "-v", "--json")
    new = len([n for n in NUMBERS if n >= 50 or n == 13])
    assert (done.code, done.summary["reused_rows"]) == (3, len(NUMBERS) - new), done.err
    assert submitted(done) == 10 + 2 + 3  # 60 comes three times in a chunk, 13 in two chunks
    check(tmp_path / "b.scored.parquet", expected)
    chained = [*command[:-1], tmp_path / "b.scored.parquet", "-o", tmp_path / "c.parquet"]
    again = score_file(*chained, "-v", "--json")
    assert (again.code, submitted(again)) == (3, 2), again.err  # the pair without a score
    check(tmp_path / "c.parquet", expected)


def test_the_summary_of_a_run_whose_rows_are_all_reused(
    options: list[object], model: Path, earlier: Path, tmp_path: Path
) -> None:
    done = score_file(write(tmp_path / "b.parquet", [1, 2]), *options, "--model", model, "--reuse", earlier)
    assert done.code == 0, done.err
    assert f"model {model}: no score was computed\n" in done.out
    verified = score_file("--verify", tmp_path / "b.scored.parquet", *options[:2])
    assert (verified.code, "2 of 2 rows were scored again, and all have" in verified.out) == (0, True), (
        verified.err
    )


@pytest.mark.parametrize("numbers", [[1, 2], [1, 2, 60]])
def test_how_reused_scores_were_made_is_told_of_the_output(
    options: list[object], model: Path, earlier: Path, numbers: list[int], tmp_path: Path
) -> None:
    """The bound is the worse one, and nothing is said about int8 that nobody has measured."""
    table = pq.read_table(earlier)
    metadata = pq.read_metadata(earlier).metadata
    made = {key: value for key, value in metadata.items() if key.startswith(b"rankmill.")}
    changed = made | {b"rankmill.bound": b"0.5", b"rankmill.backend": b"onnx, openvino, torch"}
    pq.write_table(table.replace_schema_metadata(changed), tmp_path / "earlier.parquet")
    command = [write(tmp_path / "b.parquet", numbers), *options, "--model", model, "--precision", "int8"]
    done = score_file(*command, "--reuse", tmp_path / "earlier.parquet")
    assert done.code == 0, done.err
    assert f"the scores are in fp32, as in {tmp_path / 'earlier.parquet'}\n" in done.out
    assert "not worth it" not in done.out
    found = pq.read_metadata(tmp_path / "b.scored.parquet").metadata
    names = [f"rankmill.{name}".encode() for name in ("bound", "backend", "device", "revision", "precision")]
    assert [found[name] for name in names] == [changed[name] for name in names]


def test_an_interrupted_command_continues(
    options: list[object], model: Path, earlier: Path, expected: pa.Table, tmp_path: Path
) -> None:
    source = write(tmp_path / "b.parquet", NUMBERS)
    command = [source, *options, "--model", model, "--reuse", earlier]
    dies = """
import os
from rankmill.producer.files.sink import ScoredFile
ScoredFile.finish = lambda *_: os.kill(os.getpid(), 9)
from rankmill.cli.score import score_file
score_file()
"""
    assert run_command("python", "-c", dies, *command).code == -9
    done = score_file(*command, "-v", "--json")
    assert (done.code, done.summary["resumed_rows"] > 0, submitted(done)) == (3, True, 0), done.err
    check(tmp_path / "b.scored.parquet", expected)
    moved = [*command[:-1], shutil.copy(earlier, tmp_path / "e.parquet"), "--force"]
    assert run_command("python", "-c", dies, *command, "--force").code == -9
    refused = score_file(*moved)
    assert (refused.code, "--reuse was" in refused.err) == (2, True), refused.err


def test_an_earlier_output_without_scores_is_of_no_use_and_no_harm(
    options: list[object], model: Path, tmp_path: Path
) -> None:
    nothing = write(tmp_path / "a.parquet", [13])
    command = [*options, "--model", model, "--precision", "fp32"]
    assert score_file(nothing, *command).code == 3
    source = write(tmp_path / "b.parquet", [1, 2, 1])
    done = score_file(source, *command, "--reuse", tmp_path / "a.scored.parquet", "--json")
    assert (done.code, done.summary["reused_rows"]) == (0, 0), done.err


def test_a_column_that_another_model_made_is_not_taken(
    options: list[object], model: Path, earlier: Path, tmp_path: Path
) -> None:
    command = [*options, "--model", make_bert(tmp_path / "other", seed=1), "--precision", "fp32"]
    both = tmp_path / "both.parquet"
    done = score_file(earlier, *command, "--score-column", "second", "-o", both)
    assert done.code == 3, done.err  # its metadata names the other model; `score` is of the first
    source = write(tmp_path / "b.parquet", [1, 2])
    done = score_file(source, *command, "--reuse", both)
    assert (done.code, "they are of another score column: second, not score" in done.err) == (2, True), (
        done.err
    )
    done = score_file(source, *command, "--reuse", both, "--score-column", "second", "--json")
    assert (done.code, done.summary["reused_rows"]) == (0, 2), done.err


def test_the_model_may_be_named_by_an_alias(
    options: list[object], model: Path, earlier: Path, tmp_path: Path
) -> None:
    """Its version has the same content as the earlier model, and then another one."""
    (tmp_path / "registry").mkdir()
    registry, live = Registry(str(tmp_path / "registry")), Reference("reranker", "live")
    for version, folder in {"v1": model, "v2": make_bert(tmp_path / "other", seed=1)}.items():
        put_version(tmp_path / "registry", folder, "reranker")
        registry.write_alias(live, Alias(now=target_of({version: 1.0}, shadow=None, by="a test", at=1.0)))
        source = write(tmp_path / f"{version}.parquet", [1, 2])
        command = [source, *options, "--model", "reranker@live", "--precision", "fp32", "--reuse", earlier]
        done = score_file(*command, "--json", environ={"RANKMILL_REGISTRY": str(tmp_path / "registry")})
        if version == "v1":
            assert (done.code, done.summary["reused_rows"]) == (0, 2), done.err
    assert (done.code, "they are of another revision" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{other}"], "they are of another revision"),
        (["--model", "{middle}"], "they are of another revision"),
        (["--precision", "bf16"], "they are of another precision: fp32, not bf16"),
        (["--max-length", 64], "they are of another max length: none, not 64"),
        (["--instruction", "rank"], "they are of another instruction: none, not rank"),
        (["--instruction", ""], "they are of another instruction: none, not ''"),
        (["--reuse", "{folder}/a.parquet"], "a.parquet: --reuse needs an output of score-file"),
        (["--reuse", "{folder}/nothing.parquet"], "nothing.parquet: no such file (--reuse)"),
        (["--reuse", "{folder}/a.csv"], "a.csv: --reuse needs Parquet"),
        (["--score-column", "ce"], "they are of another score column: score, not ce"),
        (["--passage-column", "other"], "they are of another passage column: passage, not other"),
    ],
)
def test_reuse_refuses_an_output_that_was_made_otherwise(
    options: list[object],
    model: Path,
    earlier: Path,
    arguments: list[object],
    message: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (earlier.parent / "a.csv").write_text("query,passage,score\nq,p,1\n")
    other = make_bert(tmp_path / "other", seed=1)
    middle = shutil.copytree(model, tmp_path / "middle")
    change_the_middle(middle / "model.safetensors")
    given = [str(each).format(other=other, middle=middle, folder=earlier.parent) for each in arguments]
    source = write(tmp_path / "b.parquet", [1])
    asked = [] if "--model" in given else ["--model", model]
    done = score_file(source, *options, *asked, "--reuse", earlier, *given)
    (line,) = done.err.strip().splitlines()
    assert (done.code, message in line) == (2, True), line
    assert not (tmp_path / "b.scored.parquet").exists()


def test_no_instruction_is_not_the_models_own(options: list[object], model: Path, tmp_path: Path) -> None:
    """Scores without the instruction that the model's files have are neither reused nor verified with it."""
    prompted = tmp_path / "prompted"
    cross_encoder(model, prompts={"ask": "how far: "}, default_prompt_name="ask").save_pretrained(
        str(prompted)
    )
    source = write(tmp_path / "a.parquet", [1, 2])
    options = [*options, "--model", prompted, "--precision", "fp32"]
    assert score_file(source, *options, "--instruction", "", "-o", tmp_path / "none.parquet").code == 0
    done = score_file(source, *options, "--reuse", tmp_path / "none.parquet", "-o", tmp_path / "own.parquet")
    assert (done.code, "another instruction: '', not none" in done.err) == (2, True), done.err
    assert score_file(source, *options, "-o", tmp_path / "own.parquet").code == 0
    scores = [pq.read_table(tmp_path / f"{name}.parquet")["score"].to_pylist() for name in ("none", "own")]
    assert scores[0] != pytest.approx(scores[1], abs=1e-3)
    for name in ("none", "own"):
        done = score_file("--verify", tmp_path / f"{name}.parquet", *options[:2])
        assert done.code == 0, done.out
