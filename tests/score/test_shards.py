"""Shards of one input, and rankmill merge."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from rankmill.cli.main import rankmill
from rankmill.producer.files.formats.table import open_reader
from rankmill.producer.files.source import cut_range, shard_range
from tests.conftest import Server, score_file
from tests.harness.models.tiny import make_bert
from tests.score.test_reuse import change_the_middle


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 7))
def test_shards_are_the_whole_in_order(sizes: list[int], shards: int) -> None:
    rows = sum(sizes)
    numbers, batches = iter(range(rows)), []
    for size in sizes:
        batches.append(pa.record_batch({"n": pa.array([next(numbers) for _ in range(size)], pa.int64())}))
    ranges = [shard_range(rows, (number, shards)) for number in range(1, shards + 1)]
    parts = [
        [n for batch in cut_range(iter(batches), *each) for n in batch["n"].to_pylist()] for each in ranges
    ]
    assert [n for part in parts for n in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def merge(*arguments: object) -> Result:
    return CliRunner().invoke(rankmill, ["merge", *map(str, arguments)])


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, shared_queue: Server, tiny_model: Path) -> Path:
    """A file of pairs, its two shards, and a shard of the same file in other chunks."""
    folder = tmp_path_factory.mktemp("parts")
    texts = [None if n in {4, 40} else f"moon river {'big ' * (n % 5)}{n}" for n in range(51)]
    pq.write_table(
        pa.table({"id": range(51), "query": ["q"] * 51, "passage": texts}), folder / "pairs.parquet"
    )
    common = [
        folder / "pairs.parquet",
        "--redis",
        shared_queue.url,
        "--model",
        tiny_model,
        "--precision",
        "fp32",
    ]
    commands: dict[str, list[object]] = {
        "whole": [],
        "1": ["--shard", "1/2"],
        "2": ["--shard", "2/2"],
        "other": ["--shard", "2/2", "--limit", 50],
    }
    for name, options in commands.items():
        assert score_file(*common, *options, "-o", folder / f"{name}.parquet").code == 3
    return folder


def test_shards_of_a_model_that_changed_between_them_are_refused(
    parts: Path, shared_queue: Server, tmp_path: Path
) -> None:
    model = make_bert(tmp_path / "model", hidden=128)
    common = [parts / "pairs.parquet", "--redis", shared_queue.url, "--model", model, "--precision", "fp32"]
    for number in (1, 2):
        output = tmp_path / f"{number}.parquet"
        assert score_file(*common, "--shard", f"{number}/2", "-o", output).code == 3
        change_the_middle(model / "model.safetensors")
    done = merge(tmp_path / "1.parquet", tmp_path / "2.parquet", "-o", tmp_path / "out.parquet")
    assert done.exit_code == 2
    assert "are not shards of one output" in done.output


def test_merged_shards_are_the_output_of_one_command(parts: Path, tmp_path: Path) -> None:
    done = merge(parts / "2.parquet", parts / "1.parquet", "-o", tmp_path / "out.parquet")
    assert done.exit_code == 3, done.output
    whole, found = (pq.read_table(path) for path in (parts / "whole.parquet", tmp_path / "out.parquet"))
    assert [pq.read_metadata(parts / f"{n}.parquet").num_rows for n in (1, 2)] == [25, 26]
    assert found.drop_columns("score").equals(whole.drop_columns("score"))
    assert found["score"].to_pylist() == pytest.approx(whole["score"].to_pylist(), abs=1e-5)
    about = pq.read_metadata(tmp_path / "out.parquet").metadata
    assert about.keys() >= {b"rankmill.model", b"rankmill.precision"}
    assert b"rankmill.shard" not in about
    errors = [json.loads(line) for line in (tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()]
    assert [each["row"] for each in errors] == [4, 40]
    assert merge(parts / "[12].parquet", "-o", tmp_path / "out.csv").exit_code == 3  # a glob in quotes
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 52


def test_a_merge_needs_no_room_but_where_its_output_is(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    done = merge(parts / "1.parquet", parts / "2.parquet", "-o", tmp_path / "out.parquet")
    assert done.exit_code == 3, done.output
    assert len((tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("bounds", [("0.001", "0.5"), ("0.001", None)])
def test_what_the_merged_output_says_holds_for_all_shards(
    parts: Path, tmp_path: Path, bounds: tuple[str, str | None]
) -> None:
    """Another worker may have scored another shard."""
    for number, bound in enumerate(bounds, 1):
        table = pq.read_table(parts / f"{number}.parquet")
        about = {
            key.decode(): value.decode()
            for key, value in pq.read_metadata(parts / f"{number}.parquet").metadata.items()
            if key.startswith(b"rankmill.") and key != b"rankmill.bound"
        }
        about |= {"rankmill.bound": bound} if bound else {}
        about |= {"rankmill.device": f"cpu, gpu{number}", "rankmill.windows": str(number)}
        shutil.copy(parts / f"{number}.parquet.errors.jsonl", tmp_path)
        with pq.ParquetWriter(tmp_path / f"{number}.parquet", table.schema) as file:
            file.write_table(table)
            file.add_key_value_metadata(about)
    merge(tmp_path / "1.parquet", tmp_path / "2.parquet", "-o", tmp_path / "out.parquet")
    about = pq.read_metadata(tmp_path / "out.parquet").metadata
    assert about.get(b"rankmill.bound") == (b"0.5" if bounds[1] else None)
    assert (about[b"rankmill.device"], about[b"rankmill.windows"]) == (b"cpu, gpu1, gpu2", b"3")


LISTED = '{"row": 4, "error": "a\u2028b", "attempts": 1, "worker": "w"}\n'


@pytest.mark.parametrize(
    ("listed", "code", "message"),
    [
        (None, 2, "1 row has no score, and 1.parquet.errors.jsonl lists 0 of them; put the list beside"),
        (LISTED[:-20], 2, "1.parquet.errors.jsonl: line 1 is damaged; score the shard again"),
        ("[]\n", 2, "1.parquet.errors.jsonl: line 1 is damaged; score the shard again"),
        (LISTED, 3, "2 rows have no score"),
    ],
)
def test_the_errors_of_all_shards_are_listed(
    parts: Path, tmp_path: Path, listed: str | None, code: int, message: str
) -> None:
    shutil.copy(parts / "1.parquet", tmp_path)
    if listed:
        (tmp_path / "1.parquet.errors.jsonl").write_text(listed)
    done = merge(tmp_path / "1.parquet", parts / "2.parquet", "-o", tmp_path / "out.parquet")
    assert (done.exit_code, message in done.output) == (code, True), done.output
    assert (tmp_path / "out.parquet").exists() == (code == 3)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_shards_are_merged_into_standard_output(parts: Path, tmp_path: Path, kind: str) -> None:
    done = merge(*(parts / f"{n}.parquet" for n in (1, 2)), "-o", "-", "--output-format", kind)
    assert done.exit_code == 3
    (tmp_path / f"out.{kind}").write_bytes(done.stdout_bytes)
    assert open_reader(tmp_path / f"out.{kind}").survey(find_nulls=False).rows == 51
    assert "51 rows of 2 shards are on standard output" in done.stderr
    assert "row 4 (counted from 0) has no score: " in done.stderr
    refused = merge(parts / "1.parquet", parts / "2.parquet", "-o", "-", "--force")
    assert (refused.exit_code, "--force has no effect with -o -" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["1"], "shard 2 of 2 is not there"),
        (["1", "2", "copy"], "copy.parquet and {}/2.parquet are both shard 2"),
        (
            ["1", "other"],
            "other.parquet and {}/1.parquet are not shards of one output: one was made with another input",
        ),
        (["1", "whole"], "whole.parquet is not a shard; make shards with score-file --shard"),
        (["1", "damaged"], "damaged.parquet: not a whole Parquet file"),
    ],
)
def test_what_cannot_be_merged(parts: Path, tmp_path: Path, names: list[str], message: str) -> None:
    shutil.copy(parts / "2.parquet", parts / "copy.parquet")
    (parts / "damaged.parquet").write_bytes((parts / "2.parquet").read_bytes()[:-9])
    done = merge(*(parts / f"{name}.parquet" for name in names), "-o", tmp_path / "out.parquet")
    assert (done.exit_code, message.format(parts) in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "3/2", "-o", "o.parquet"], "'3/2' is not a part of a whole"),
        (["--shard", "1/2"], "this output has no default: name it with -o"),
        (["--shard", "1/2", "-o", "o.csv"], "o.csv: a shard is Parquet"),
        (["--shard", "1/2", "-o", "o.parquet", "--top-k", 3], "its rows are not ranked"),
    ],
)
def test_wrong_shards(parts: Path, tmp_path: Path, arguments: list[object], message: str) -> None:
    done = score_file(parts / "pairs.parquet", *arguments, cwd=tmp_path)
    assert (done.code, message in done.err) == (2, True), done.err
