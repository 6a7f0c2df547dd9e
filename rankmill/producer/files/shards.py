"""Merges shards. Each shard is the output of a part of the input, and several producers may have made the
shards.

A shard may itself be in parts; then all parts of all shards are merged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.results import worst
from rankmill.jobs.contract.shown import unscored
from rankmill.producer.files.formats.base import ReadOptions
from rankmill.producer.files.formats.parquet import PARQUET, ParquetReader, metadata_of
from rankmill.producer.files.outputs import PART, PARTS, OutputFormat, bound_of, errors_name, is_part
from rankmill.producer.files.source import Shard
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream
from rankmill.producer.files.stores.writing import whole_file

_NUMBER, _OF, _WHOLE = "rankmill.shard", "rankmill.shards", "rankmill.shard_of"
_SAME = ("rankmill.revision", "rankmill.precision", "rankmill.kind")
"""Keys of metadata. Their values must be equal in all shards of one output, except in shards without rows.
The digest of the manifest must be equal in every shard.
"""

_BOUND, _WINDOWS = "rankmill.bound", "rankmill.windows"

_ROWS = 65_536


def check_shard(target: AnyPath, form: OutputFormat) -> None:
    """Check that a shard, or a part of one, can be written at `target`; raises `InputError` if not."""
    if form.of(target) is not PARQUET or form.ranks(target):
        raise InputError(
            f"{target}: a shard is Parquet, and its rows are not ranked (--shard); "
            "rankmill merge writes other formats"
        )


def shard_metadata(shard: Shard, manifest: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata by which `merge` recognizes the shards of one output. All parts of a shard have the
    same values.
    """
    others = {name: value for name, value in manifest.items() if name not in {"--shard", "--rows-per-part"}}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()
    return {_NUMBER: str(shard[0]), _OF: str(shard[1]), _WHOLE: digest}


def merge(paths: Sequence[AnyPath], target: AnyPath, form: OutputFormat) -> tuple[int, int]:
    """Merge all shards of an output, in the order of the input; lists of row errors are merged as well.

    A folder in `paths` stands for all parts in it. Returns the number of rows in the merged output, and the
    number of its rows without a score.

    Raises
    ------
    InputError
        A file is not a shard, belongs to another output, is given twice or is damaged; or a shard, a part or
        a row in a list of errors is missing; or the format of `target` cannot hold a column.
    OutputError, StoreError
        The output cannot be written.
    """
    pieces = _in_order(list(_with_parts(paths)))
    kept = _metadata(pieces)
    errors = target.with_name(f"{target.name}.errors.jsonl")
    rows = row_errors = first = 0
    with whole_file(target) as partial, tempfile.TemporaryFile("w+b", dir=partial.parent) as listed:
        writer = form.writer(partial, target, pieces[0].schema, "score")
        for piece in pieces:
            first = rows if piece.part == 1 else first  # lists of row errors number a shard's rows from 0
            count, lacking = _copy_errors(piece.path, first, listed), 0
            row_errors += count
            for batch in piece.reader.batches(piece.schema, _ROWS):
                writer.write(pa.Table.from_batches([batch]))
                rows += len(batch)
                lacking += batch[piece.score].null_count if piece.score in batch.schema.names else 0
            if lacking > count:
                raise InputError(
                    f"{piece.path}: {unscored(lacking)}, and {errors_name(piece.path.name)} "
                    f"lists {count:,} of them; put the list beside the shard, or score the shard again"
                )
        writer.close(kept)
        if row_errors:
            with whole_file(errors) as partial_errors, partial_errors.open("wb") as out:
                listed.seek(0)
                shutil.copyfileobj(listed, out)
        else:
            errors.unlink(missing_ok=True)
    return rows, row_errors


def _metadata(pieces: Sequence[_Piece]) -> dict[str, str]:
    """Make the metadata of a merged output from the metadata of its pieces, which are shards or parts of
    shards.
    """
    largest = max(pieces, key=lambda piece: piece.rows).about
    scored = [piece for piece in pieces if piece.rows] or pieces
    joined = {
        f"rankmill.{name}": ", ".join(sorted({word for piece in scored for word in piece.words(name)}))
        for name in ("backend", "device")
    }
    bound = worst([piece.bound for piece in scored])
    of_bound = {} if bound is None else {_BOUND: f"{bound:g}"}
    by_shard: dict[int, int] = {}
    for piece in scored:  # a part's sum includes the sums of the shard's earlier parts
        by_shard[piece.shard] = max(piece.windows, by_shard.get(piece.shard, 0))
    of_windows = {_WINDOWS: str(sum(by_shard.values()))} if _WINDOWS in largest else {}
    left_out = {_NUMBER, _OF, _WHOLE, PART, PARTS, _BOUND}
    same = {
        key: value for key, value in largest.items() if key.startswith("rankmill.") and key not in left_out
    }
    return {**same, **joined, **of_bound, **of_windows}


def _with_parts(paths: Iterable[AnyPath]) -> Iterator[AnyPath]:
    """Replace each folder by the parts in it; raises `InputError` if a folder has none."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files: Iterable[AnyPath] = path.iterdir()
        parts = sorted(file for file in files if is_part(file.name))
        if not parts:
            raise InputError(f"{path}: no part of an output in this directory")
        yield from parts


class _Piece:
    """A file that is a shard, or a part of a shard. Shards and parts are numbered from 1.

    The constructor raises `InputError` if the file is neither.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self.reader = ParquetReader(path, (), ReadOptions())
        survey = self.reader.survey(find_nulls=False)
        self.rows, self.schema = survey.rows, survey.schema
        self.about = metadata = metadata_of(path)
        if not all(metadata.get(name, "").isdecimal() for name in (_NUMBER, _OF)):
            raise InputError(f"{path} is not a shard; make shards with score-file --shard 1/8, 2/8 and so on")
        self.shard, self.shards = int(metadata[_NUMBER]), int(metadata[_OF])
        self.part, self.parts = int(metadata.get(PART, 1)), int(metadata.get(PARTS, 1))
        self.score = metadata.get("rankmill.score_column", "")
        self.bound = bound_of(metadata)
        self.windows = int(metadata.get(_WINDOWS, 0))

    def words(self, name: str) -> list[str]:
        """Split the value of ``rankmill.NAME`` in the file's metadata at its commas."""
        return [word for word in self.about.get(f"rankmill.{name}", "").split(", ") if word]


def _in_order(paths: Sequence[AnyPath]) -> list[_Piece]:
    """Open the shards, or parts of shards, at `paths`, and return them in the order of the input. Raises
    `InputError` if a shard or part is missing or given twice, or if two of the files belong to different
    outputs.
    """
    by_place: dict[tuple[int, int], _Piece] = {}
    first: dict[str, _Piece] = {}
    for piece in map(_Piece, paths):
        # a shard without rows lacks revision, precision and kind, because nothing was scored
        for name in (_WHOLE, _OF, *(_SAME if piece.rows else ())):
            other = first.setdefault(name, piece)
            if piece.about.get(name, "") != other.about.get(name, ""):
                difference = f"another {name[9:]}" if name in _SAME else "another input or other options"
                raise InputError(
                    f"{piece.path} and {other.path} are not shards of one output: one was made with "
                    f"{difference}"
                )
        same = by_place.setdefault((piece.shard, piece.part), piece)
        if same is not piece:
            part = f"part {piece.part} of " if piece.parts > 1 else ""
            raise InputError(f"{piece.path} and {same.path} are both {part}shard {piece.shard}; name it once")
    _check_complete(list(by_place.values()))
    return [by_place[place] for place in sorted(by_place)]


def _check_complete(pieces: Sequence[_Piece]) -> None:
    shards, parts = pieces[0].shards, {piece.shard: (piece.parts, piece.path.parent) for piece in pieces}
    missing = [str(number) for number in range(1, shards + 1) if number not in parts]
    if missing:
        raise InputError(
            f"shard {', '.join(missing)} of {shards} is not there; name all, for example with a glob"
        )
    given = {(piece.shard, piece.part) for piece in pieces}
    for shard, (count, folder) in parts.items():
        for part in range(1, count + 1):
            if (shard, part) not in given:
                raise InputError(
                    f"{folder}: part {part} of {count} of shard {shard} of {shards} is not there; name all "
                    "of them, or their folder; if score-file has not finished, the same command continues"
                )


def _copy_errors(path: AnyPath, first: int, out: IO[bytes]) -> int:
    """Copy a shard's list of row errors, with row numbers of the whole output, and count the errors."""
    listed = path.with_name(errors_name(path.name))
    if not listed.exists():
        return 0
    with open_stream(listed) as stream:
        lines = bytes(stream.read()).splitlines()  # a text would also be split at U+2028
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            whole_record = {**record, "row": record["row"] + first}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{listed}: line {number} is damaged; score the shard again") from None
        out.write((json.dumps(whole_record, ensure_ascii=False) + "\n").encode())
    return len(lines)
