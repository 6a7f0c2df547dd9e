"""Damaged Parquet: wherever a file is read, a page that is not what its checksum says is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from rankmill.cli.main import rankmill
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.corpus.index import in_memory, on_disk
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.outputs import OutputFormat
from rankmill.producer.files.source import FileSource, open_source
from rankmill.producer.files.stores.reading import fingerprint
from rankmill.score.reuse import earlier_scores
from rankmill.score.verify import ScoredBefore, verify
from tests.conftest import Server, score_file

ROWS = 40
TABLE = pa.table(
    {
        "query_id": [f"q{n // 10}" for n in range(ROWS)],
        "doc_id": [f"d{n}" for n in range(ROWS)],
        "query": [f"which number is {n}" for n in range(ROWS)],
        "passage": [f"the number is {n}" for n in range(ROWS)],
        "relevance": [n % 10 == 0 for n in range(ROWS)],
        "score": pa.array([n / 8 for n in range(ROWS)], pa.float32()),
    }
).cast(pa.schema({"query_id": "string", "doc_id": "string", "query": "string", "passage": "string",
                  "relevance": "int64", "score": "float32"}))  # fmt: skip
ABOUT = {
    "rankmill.version": "0.1.0", "rankmill.model": "demo", "rankmill.precision": "fp32",
    "rankmill.activation": "default", "rankmill.bound": "0.001",
    "rankmill.shard": "1", "rankmill.shards": "1",
    "rankmill.query_column": "query", "rankmill.passage_column": "passage", "rankmill.score_column": "score",
}  # fmt: skip


def write(path: Path, table: pa.Table, version: str = "1.0") -> Path:
    pq.write_table(
        table.replace_schema_metadata(ABOUT),
        path,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        data_page_version=version,
    )
    return path


def damaged(path: Path, table: pa.Table = TABLE, version: str = "1.0") -> Path:
    """A file in which one letter of a text, and one of an id, is another one."""
    raw = write(path, table, version).read_bytes()
    for good, bad in ((b"the number is 7", b"the bumber is 7"), (b"d33", b"e33")):
        assert raw.count(good) == 1
        raw = raw.replace(good, bad)
    path.write_bytes(raw)
    pq.read_table(path)  # Arrow reads it if nobody asks for the checksums
    return path


def source(path: Path, *, nulls: bool = True) -> FileSource:
    return open_source(find_files([str(path)]), TextColumns("query", "passage"), allow_nulls=nulls)


def reused(path: Path) -> object:
    request = FileRequest(inputs=(str(path),), reuse=str(path))
    return earlier_scores(request, load_settings({"model": "demo", "precision": "fp32"}))


def texts(path: Path) -> Path:
    return damaged(path, TABLE.select(["doc_id", "passage"]).rename_columns(["id", "text"]))


READERS: dict[str, Callable[[Path], object]] = {
    "input": lambda path: list(source(damaged(path)).tables(Sizing(8))),
    "input, pages of version 2": lambda path: list(source(damaged(path, version="2.0")).tables(Sizing(8))),
    "input, some columns": lambda path: list(source(damaged(path)).select(["doc_id"])),
    "input, nulls are looked for": lambda path: source(damaged(path), nulls=False),
    "queries": lambda path: in_memory([texts(path)]),
    "corpus": lambda path: on_disk([texts(path)], [fingerprint(path)]),
    "reuse": lambda path: reused(damaged(path)),
    "verify": lambda path: verify(ScoredBefore(damaged(path), ABOUT, load_settings({})), 1000),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_page_is_an_error_that_names_the_file(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(
        InputError, match=r"^\S*a\.parquet: damaged Parquet data: .*checksum.*get the file again$"
    ):
        READERS[reader](path)


@pytest.mark.parametrize(
    "command", ["merge {} -o out.parquet", "evaluate {} --qrels {}", "mine {} -o out.parquet"]
)
def test_commands_name_the_damaged_file(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(rankmill, command.format(*[damaged(Path("a.parquet"))] * 2).split())
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "a.parquet: damaged Parquet data" in done.stderr
    assert not Path("out.parquet").exists()


def test_a_run_over_a_damaged_file_writes_no_output(
    tmp_path: Path, shared_queue: Server, tiny_model: Path
) -> None:
    path = damaged(tmp_path / "a.parquet")
    done = score_file(path, "--redis", shared_queue.url, "--model", tiny_model, "--score-column", "s")
    assert done.code == 2
    assert "a.parquet: damaged Parquet data" in done.err
    assert not path.with_name("a.scored.parquet").exists()


def test_outputs_have_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    writer = OutputFormat().writer(path, path, TABLE.schema, "score")
    writer.write(TABLE)
    writer.close({})
    raw = bytearray(path.read_bytes())
    texts = pq.read_metadata(path).row_group(0).column(TABLE.column_names.index("passage"))
    raw[texts.dictionary_page_offset + 100] ^= 1  # behind the page's header
    path.write_bytes(raw)
    with pytest.raises(InputError, match="CRC checksum verification"):
        list(source(path).tables(Sizing(8)))
