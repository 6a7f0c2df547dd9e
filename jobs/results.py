"""What a worker says of a finished chunk, and its form in the run's result stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import Field

from jobs.errors import WireError
from jobs.schema import Count, Seconds, WireModel
from jobs.wire import decode_scores, encode_scores


class ChunkStats(WireModel):
    """How a chunk was scored: for summaries, metrics and the output's metadata.

    ``tokens`` were real, ``padded_tokens`` were computed (real and padding); ``attempt`` counts
    from 1; ``seconds`` is from fetching the payload to having the scores. ``int8_gain`` is how many
    times as fast int8 would be on this worker, where that was measured.
    """

    added: ClassVar[frozenset[str]] = frozenset({"int8_gain"})

    worker: str
    device: str
    backend: str
    precision: str
    revision: str | None
    attempt: Count
    tokens: Count
    padded_tokens: Count
    batches: Count
    seconds: Seconds
    int8_gain: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True)
class ChunkScores:
    """A scored chunk: float32 ``scores`` and text ``errors`` of shape ``[n]``, one of them null."""

    chunk: int
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats


class ChunkFailure(WireModel):
    """A chunk that no worker could score. ``fatal``: no chunk of the run could be scored.

    ``attempts`` were made at it, the last by ``worker``, where that is known. ``died``: each ended
    with the end of its worker, so that one of the chunk's rows may be what kills it.
    """

    chunk: Count
    message: str
    fatal: bool
    attempts: Count = 1
    worker: str = ""
    died: bool = False


ChunkResult = ChunkScores | ChunkFailure


@dataclass(frozen=True)
class BadResult:
    """What came for a result and is none; ``chunk`` is known if nothing but the rest was damaged."""

    chunk: int | None
    reason: str


def to_entry(result: ChunkResult) -> dict[str, str | int | bytes]:
    """The stream entry of a result."""
    if isinstance(result, ChunkFailure):
        return {
            "chunk": result.chunk,
            "failure": result.message.encode(errors="replace").decode(),
            "fatal": int(result.fatal),
            "attempts": result.attempts,
            "worker": result.worker,
            "died": int(result.died),
        }
    return {
        "chunk": result.chunk,
        "scores": encode_scores(result.scores, result.errors),
        "stats": result.stats.model_dump_json(),
    }


def from_entry(entry: Mapping[bytes, bytes]) -> ChunkResult:
    """Read a stream entry back.

    Raises
    ------
    WireError
        Anything in it is not as `to_entry` writes it.
    """
    chunk = _chunk_number(entry)
    if chunk is None:
        raise WireError("a result does not say which chunk it is of")
    what = f"the result of chunk {chunk}"
    if b"failure" in entry:
        return ChunkFailure.read_fields(
            {b"message" if name == b"failure" else name: value for name, value in entry.items()}, what
        )
    if entry.keys() != {b"chunk", b"scores", b"stats"}:
        raise WireError(f"{what} is damaged: it is neither scores nor a failure")
    scores, errors = decode_scores(entry[b"scores"])
    return ChunkScores(chunk, scores, errors, ChunkStats.read_json(entry[b"stats"], what))


def read_entry(entry: Mapping[bytes, bytes]) -> ChunkResult | BadResult:
    """Like `from_entry`, for entries that anybody may have written."""
    try:
        return from_entry(entry)
    except WireError as error:
        return BadResult(_chunk_number(entry), str(error))


def _chunk_number(entry: Mapping[bytes, bytes]) -> int | None:
    """The number of the chunk that a stream entry is of, where it can be read."""
    raw = entry.get(b"chunk", b"")
    return int(raw) if raw.isdigit() and len(raw) < 19 else None
