"""The result of a chunk, its entry in the run's stream of results, and the usage of devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import pyarrow as pa
from pydantic import BeforeValidator, Field

from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.keys import ChunkId, PieceId, read_chunk_id
from rankmill.jobs.contract.schema import Count, Seconds, WireModel, none_if_empty
from rankmill.jobs.contract.wire import decode_scores, encode_scores, outputs


def worst(bounds: Collection[float | None]) -> float | None:
    """Return the largest of several bounds on the error of scores.

    Return ``None`` if one of the bounds is unknown, or if there are none.
    """
    values = [bound for bound in bounds if bound is not None]
    return max(values) if values and len(values) == len(bounds) else None


class ChunkStats(WireModel):
    """How a chunk was scored, for summaries, metrics and the output's metadata.

    Attributes
    ----------
    worker, device, device_name, backend, precision, revision
        What scored the chunk.
    attempt
        Number of the attempt, from 1.
    tokens, padded_tokens
        Numbers of tokens without padding, and with it.
    batches
        Number of batches that had rows of the chunk.
    seconds
        Time from fetching the payload to having the scores, without loading the model.
    tokenize_seconds, forward_seconds
        Time for tokenizing the chunk, and for the batches that had rows of it. Both are parts of ``seconds``.
    device_seconds
        Device time of the chunk. The time of a batch is divided among its chunks by their tokens.
    int8_gain
        Speed of int8 on this worker divided by the speed of ``precision``; ``None`` if not measured.
    windows
        Number of windows into which long texts were cut.
    labels
        Names of the outputs, if each row has several scores.
    bound
        Limit for the error of a score, which the worker's check of the model has found (`Proof.bound`).
        ``None`` means that the model was not checked.
    reference
        ``own`` if the model was too large to be checked against fp32 (`Proof.reference`); otherwise ``None``.
    kind
        For a deterministic run, a text that names device, versions and precision. Workers that have the same
        text and the same model give a row exactly the same score.
    """

    worker: str
    device: str
    device_name: Annotated[str, Field(min_length=1)]
    backend: str
    precision: str
    revision: str | None
    attempt: Count
    tokens: Count
    padded_tokens: Count
    batches: Count
    seconds: Seconds
    tokenize_seconds: Seconds = 0.0
    forward_seconds: Seconds = 0.0
    device_seconds: Seconds = 0.0
    int8_gain: Annotated[float, Field(gt=0)] | None = None
    windows: Count = 0
    labels: tuple[str, ...] = ()
    bound: Annotated[float, Field(ge=0)] | None = None
    reference: Literal["own"] | None = None
    kind: str | None = None


@dataclass(frozen=True)
class ChunkScores:
    """The scores and errors of a chunk, as arrays with an entry for each row.

    Attributes
    ----------
    scores
        A float32, or a list with a float32 for each label in ``stats.labels``; null if the row has an error.
    errors
        Why the row has no score; null if the row has a score.
    tokens
        If the job asks for numbers of tokens, these numbers (int32; null if unknown). If the rows are
        `TokensAsked`, the answers as JSON. For any other job, ``None``.
    """

    chunk: ChunkId
    scores: pa.Array
    errors: pa.Array
    stats: ChunkStats
    tokens: pa.Array | None = None


def _parse_chunk(value: object) -> ChunkId:
    chunk = value if isinstance(value, PieceId) else read_chunk_id(value)
    if chunk is None:
        raise ValueError("no chunk has this name")
    return chunk


class ChunkFailure(WireModel):
    """A chunk that no worker could score.

    Attributes
    ----------
    fatal
        Whether the whole run ends with this failure, because none of its chunks could be scored.
    attempts
        Number of attempts.
    worker
        The worker of the last attempt; empty if unknown.
    died
        Whether the worker died during the last attempt, so that one of the rows may kill workers.
    option
        Name of the field in the spec whose value is wrong for the model; ``None`` for any other failure.
    """

    chunk: Annotated[ChunkId, BeforeValidator(_parse_chunk)]
    message: str
    fatal: bool
    attempts: Count = 1
    worker: str = ""
    died: bool = False
    option: Annotated[str | None, BeforeValidator(none_if_empty)] = None


ChunkResult = ChunkScores | ChunkFailure


@dataclass(frozen=True)
class BadResult:
    """A stream entry that is not a valid result. ``chunk`` is ``None`` if the entry names no chunk of the
    run.
    """

    chunk: ChunkId | None
    reason: str


def to_entry(run_id: str, result: ChunkResult) -> dict[str, str | int | bytes]:
    """Make the fields of a Redis stream entry from the result of a chunk."""
    whose: dict[str, str | int | bytes] = {"run": run_id, "chunk": str(result.chunk)}
    if isinstance(result, ChunkFailure):
        return whose | {
            "failure": result.message.encode(errors="replace").decode(),
            "fatal": int(result.fatal),
            "attempts": result.attempts,
            "worker": result.worker,
            "died": int(result.died),
            "option": result.option or "",
        }
    scores = encode_scores(result.scores, result.errors, result.tokens)
    return whose | {"scores": scores, "stats": result.stats.written()}


def from_entry(run_id: str, entry: Mapping[bytes, bytes]) -> ChunkResult:
    """Read a result of a run from its stream entry.

    Raises
    ------
    WireError
        The entry is not one that `to_entry` writes for this run.
    """
    run = entry.get(b"run", b"unknown").decode(errors="replace")
    if run != run_id:
        raise WireError(f"the results of run {run_id} have one of run {run:.40}")
    chunk = _chunk_named(run_id, entry)
    if chunk is None:
        raise WireError("a result does not name its chunk")
    subject, rest = f"the result of chunk {chunk}", {name: entry[name] for name in entry if name != b"run"}
    if b"failure" in entry:
        return ChunkFailure.read_fields(
            {b"message" if name == b"failure" else name: value for name, value in rest.items()}, subject
        )
    if rest.keys() != {b"chunk", b"scores", b"stats"}:
        raise WireError(f"{subject} is damaged: it is neither scores nor a failure")
    scores, errors, tokens = decode_scores(entry[b"scores"])
    stats = ChunkStats.read_json(entry[b"stats"], subject)
    if len(stats.labels) != outputs(scores):
        raise WireError(f"{subject} is damaged: its scores are not those of its {len(stats.labels)} labels")
    return ChunkScores(chunk, scores, errors, stats, tokens)


def read_entry(run_id: str, entry: Mapping[bytes, bytes]) -> ChunkResult | BadResult:
    """Read a result from a stream entry. A damaged entry becomes a `BadResult`."""
    try:
        return from_entry(run_id, entry)
    except WireError as error:
        return BadResult(_chunk_named(run_id, entry), str(error))


def _chunk_named(run_id: str, entry: Mapping[bytes, bytes]) -> ChunkId | None:
    return read_chunk_id(entry.get(b"chunk")) if entry.get(b"run") == run_id.encode() else None


Amount = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A count in Redis. It is below 2⁵³, because Lua scripts count in 64-bit floating point."""


class Amounts(NamedTuple):
    """The usage of one device.

    Attributes
    ----------
    pairs, tokens
        The number of scored pairs, and of their tokens.
    microseconds
        The device's time for these pairs.
    cached
        Rows that were not computed, because their score was known from an equal row or an earlier output.
    failed
        Rows without a score.
    """

    pairs: Amount = 0
    tokens: Amount = 0
    microseconds: Amount = 0
    cached: Amount = 0
    failed: Amount = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Amounts()

NO_DEVICE = ""
"""Name of the device for rows without a score, and for rows that needed no work."""

Usage = Mapping[str, Amounts]
"""The pairs, tokens and time of each device, by the device's name."""


def used_by(result: ChunkScores) -> dict[str, Amounts]:
    """Return what a scored chunk has used: pairs, tokens and device time, by the device's name."""
    stats = result.stats
    pairs = len(result.scores) - result.scores.null_count
    microseconds = round(1e6 * stats.device_seconds)
    return {stats.device_name: Amounts(pairs, stats.tokens, microseconds)}


def joined_usage(one: Usage, other: Usage) -> dict[str, Amounts]:
    """Add two usages, device by device."""
    names = one.keys() | other.keys()
    return {name: one.get(name, NOTHING).plus(other.get(name, NOTHING)) for name in sorted(names)}
