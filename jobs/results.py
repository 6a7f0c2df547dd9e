"""What a worker says of a finished chunk, and its form in the run's result stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pyarrow as pa

from jobs.wire import decode_scores, encode_scores


@dataclass(frozen=True)
class ChunkStats:
    """How a chunk was scored: for summaries, metrics and the output's metadata.

    ``tokens`` were real, ``padded_tokens`` were computed (real and padding); ``attempt`` counts
    from 1; ``seconds`` is from fetching the payload to having the scores.
    """

    worker: str
    device: str
    backend: str
    precision: str
    revision: str | None
    attempt: int
    tokens: int
    padded_tokens: int
    batches: int
    seconds: float


@dataclass(frozen=True)
class ChunkScores:
    """A scored chunk: float32 ``scores`` and text ``errors`` of shape ``[n]``, one of them null."""

    chunk: int
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats


@dataclass(frozen=True)
class ChunkFailure:
    """A chunk that no worker could score. ``fatal``: no chunk of the run could be scored.

    ``attempts`` were made at it, the last by ``worker``, where that is known. ``died``: each ended
    with the end of its worker, so that one of the chunk's rows may be what kills it.
    """

    chunk: int
    message: str
    fatal: bool
    attempts: int = 1
    worker: str = ""
    died: bool = False


ChunkResult = ChunkScores | ChunkFailure


def to_entry(result: ChunkResult) -> dict[str, str | int | bytes]:
    """The stream entry of a result."""
    if isinstance(result, ChunkFailure):
        return {
            "chunk": result.chunk,
            "failure": result.message,
            "fatal": int(result.fatal),
            "attempts": result.attempts,
            "worker": result.worker,
            "died": int(result.died),
        }
    return {
        "chunk": result.chunk,
        "scores": encode_scores(result.scores, result.errors),
        "stats": json.dumps(asdict(result.stats)),
    }


def from_entry(entry: Mapping[bytes, bytes]) -> ChunkResult:
    """Read a stream entry back; raises `jobs.errors.WireError` for damaged scores."""
    chunk = int(entry[b"chunk"])
    if b"failure" in entry:
        return ChunkFailure(
            chunk,
            entry[b"failure"].decode(),
            bool(int(entry[b"fatal"])),
            int(entry[b"attempts"]),
            entry[b"worker"].decode(),
            bool(int(entry[b"died"])),
        )
    scores, errors = decode_scores(entry[b"scores"])
    return ChunkScores(chunk, scores, errors, ChunkStats(**json.loads(entry[b"stats"])))
