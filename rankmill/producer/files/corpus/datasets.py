"""Writes texts, judgements and rankings of ir_datasets into Parquet files, and keeps the files for later
commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa

from rankmill.jobs.cache import temporary_folder
from rankmill.jobs.contract.errors import ConfigError, InputError, OutputError, RankmillError
from rankmill.jobs.contract.file_request import DATASET
from rankmill.jobs.contract.home import of_user
from rankmill.jobs.runtime.installation import install_line
from rankmill.producer.files.stores.paths import AnyPath, as_path
from rankmill.producer.files.stores.roots import confined
from rankmill.producer.files.stores.writing import sync

DatasetPart = Literal["queries", "docs", "qrels", "scoreddocs"]

_TEXT, _NUMBER = pa.string(), pa.float64()
_SCHEMAS: dict[DatasetPart, pa.Schema] = {
    "queries": pa.schema({"query_id": _TEXT, "text": _TEXT}),
    "docs": pa.schema({"doc_id": _TEXT, "text": _TEXT}),
    "qrels": pa.schema({"query_id": _TEXT, "doc_id": _TEXT, "relevance": pa.int64()}),
    "scoreddocs": pa.schema({"query_id": _TEXT, "doc_id": _TEXT, "score": _NUMBER}),
}
_ROWS = 16_384

_T = TypeVar("_T")


def source_path(name: str, part: DatasetPart) -> AnyPath:
    """Return the path of a file, of an object, or of a part of an ir_datasets dataset.

    The first command that uses a part of a dataset writes it to a file in the user's cache folder.

    Parameters
    ----------
    name
        A path, a URL, or ``irds:NAME`` for a dataset.
    part
        The part of the dataset, such as its queries.

    Raises
    ------
    InputError
        ir_datasets does not know the dataset, or the dataset lacks the part or cannot be read.
    ConfigError
        ir_datasets is not installed.
    OutputError
        The file cannot be written.
    """
    return _dataset_file(name.removeprefix(DATASET), part) if name.startswith(DATASET) else as_path(name)


def _dataset_file(name: str, part: DatasetPart) -> Path:
    try:
        import ir_datasets
    except ImportError:
        raise ConfigError(f"{DATASET}{name} needs ir_datasets: {install_line('irds')}") from None
    dataset_name = f"{DATASET}{name}"
    try:
        dataset = ir_datasets.load(name)
    except KeyError:
        raise InputError(f"{dataset_name}: ir_datasets has no such dataset") from None
    if not dataset.has(part):
        lacks = {"docs": "passages", "scoreddocs": "run; name one with --run"}.get(part, part)
        raise InputError(f"{dataset_name} has no {lacks}")
    whole = _asked(dataset_name, lambda: ir_datasets.parent_id(name, ir_datasets.EntityType(part)))
    home = of_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")
    file = home / "rankmill" / "datasets" / f"{whole.replace('/', '--')}.{part}.parquet"
    if roots := confined():
        roots.also_read(file.parent)
    if not file.exists():
        _write(file, dataset_name, part, _asked(dataset_name, getattr(dataset, f"{part}_iter")))
    return file


def _write(file: Path, dataset: str, part: DatasetPart, items: Iterator[Any]) -> None:
    """Write a part of a dataset to a temporary file, and move this file into place. Another process may do so
    at the same time.
    """
    import pyarrow.parquet as pq

    schema = _SCHEMAS[part]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(".making-", file.parent) as making:
            new = making / file.name
            with pq.ParquetWriter(new, schema, compression="zstd", write_page_checksum=True) as writer:
                while rows := _asked(dataset, lambda: [_row(part, item) for item in islice(items, _ROWS)]):
                    writer.write_batch(pa.RecordBatch.from_pylist(rows, schema))
            sync(new)
            new.replace(file)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from None


def _row(part: DatasetPart, item: Any) -> dict[str, object]:
    """Convert a query, passage, judgement or score of ir_datasets to a row of the Parquet file."""
    if part in {"queries", "docs"}:
        return {_SCHEMAS[part].names[0]: item[0], "text": item.default_text()}
    return {name: getattr(item, name) for name in _SCHEMAS[part].names}


def _asked(dataset: str, ask: Callable[[], _T]) -> _T:
    """Call `ask`, and turn any error of ir_datasets, such as a failed download, into an `InputError`."""
    try:
        return ask()
    except RankmillError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{dataset} cannot be read by ir_datasets: {reason}") from None
