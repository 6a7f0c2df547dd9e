"""Damages record, payloads, jobs, results and progress of a run in Redis, for `benchmarks.faults.fuzz`.

No damage is a payload of other valid pairs, or a result with other valid scores, because nobody can tell
those from good ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from rq.job import Job

from benchmarks.faults.damaged_jobs import DATES, FIELDS, JSONS, NUMBERS, TEXTS, datas
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.results import ChunkFailure, ChunkScores, ChunkStats, to_entry
from rankmill.jobs.contract.schema import FORMAT
from rankmill.jobs.contract.wire import decode_scores, encode_rows, encode_scores

ANYTHING = [*DATES, *JSONS, *NUMBERS, *TEXTS, b"RKML", b"RKML\x02" + b"\xff" * 40]
RUN_FIELDS = [b"format", b"spec", b"queue", b"ttl", b"max_retries", b"created", b"rows", b"odd"]
RESULT_FIELDS = [b"run", b"chunk", b"scores", b"stats", b"failure", b"fatal", b"attempts", b"worker", b"died"]
STATS = ChunkStats(
    worker="odd", device="cpu", device_name="cpu", backend="odd", precision="fp32", revision=None,
    attempt=1, tokens=1, padded_tokens=1, batches=1, seconds=0.1,
)  # fmt: skip


def put(client: Any, key: str | bytes, rng: random.Random) -> None:
    """Replace a key by a value of any type, for a minute."""
    value = rng.choice([value for value in ANYTHING if value])
    client.delete(key)
    kinds: list[Callable[[], object]] = [
        lambda: client.set(key, value),
        lambda: client.hset(key, mapping={value[:50]: value}),
        lambda: client.rpush(key, value, value),
        lambda: client.sadd(key, value),
        lambda: client.zadd(key, {value: rng.choice([0, 1e300, 4e9])}),
        lambda: client.xadd(key, {b"field": value}),
    ]
    rng.choice(kinds)()
    client.expire(key, 60)


def packed(stream: bytes, *, size: int | None = None) -> bytes:
    """An Arrow stream as a payload; `size` is what its header says of the bytes in it."""
    said = len(stream) if size is None else size
    compressed = bytes(pa.compress(stream, codec="zstd", asbytes=True))
    return b"RKML" + FORMAT.to_bytes(4, "big") + said.to_bytes(8, "big") + compressed


@cache
def bombs() -> list[bytes]:
    """Small payloads that a careless reader makes large."""
    large = pa.array(["a" * (80 << 20)])
    query = pa.array(["q"]).dictionary_encode()
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([query, large], names=["query", "passage"])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    rows = 1 << 20
    nulls = pa.array([None] * rows, pa.string())
    zeros = b"\0" * (300 << 20)
    return [
        packed(sink.getvalue().to_pybytes()),
        packed(zeros),
        packed(zeros, size=1000),
        encode_rows([pa.array(["q"] * rows), nulls], "pairs"),
    ]


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """A payload with some bytes changed, removed or added."""
    found = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(max(len(found), 1))
        kind = rng.random()
        if kind < 0.6 and found:
            found[place] = rng.randrange(256)
        elif kind < 0.8:
            del found[place : place + rng.randint(1, 40)]
        else:
            found[place:place] = rng.randbytes(rng.randint(1, 40))
    return bytes(found)


def bad_result(run_id: str, chunk: int, rows: int, rng: random.Random) -> Mapping[Any, Any]:
    """A stream entry that is nearly a good result."""
    scores, errors = pa.array(np.ones(rows, np.float32)), pa.nulls(rows, pa.string())
    good = to_entry(run_id, ChunkScores(chunk, scores, errors, STATS))
    odd = pa.array([rng.choice([np.nan, np.inf, -np.inf])] + [1.0] * (rows - 1), pa.float32())
    said = pa.array(["no"] * rows)
    more = rng.choice([0, 1, rows - 1, rows + 1, 5000])
    return rng.choice([
        {**good, "scores": encode_scores(odd, errors)},
        {**good, "scores": encode_scores(scores, said)},
        {**good, "scores": encode_scores(pa.nulls(rows, pa.float32()), errors)},
        {**good, "scores": encode_scores(pa.array(np.ones(more, np.float32)), pa.nulls(more, pa.string()))},
        {**good, "scores": encode_rows([said, said], "pairs")},
        {**good, "scores": _refused(mutated(encode_scores(odd, errors), rng))},
        {**good, "chunk": rng.choice([b"-1", b"99", b"7", b"1e3", b"\xff", b"9" * 30, b""])},
        {**good, "stats": rng.choice(ANYTHING)},
        {**good, "stats": STATS.model_dump_json().replace("0.1", rng.choice(["NaN", "1e400", "-1", '""']))},
        {**good, "more": b"1"},
        {**good, "failure": b"both", "fatal": 0},
        {**to_entry(run_id, ChunkFailure(chunk=chunk, message="odd", fatal=False)),
         rng.choice(["failure", "fatal", "attempts", "worker", "died", "more"]): rng.choice(ANYTHING)},
        {name: rng.choice(ANYTHING) for name in rng.sample(RESULT_FIELDS, rng.randint(1, 6))},
    ])  # fmt: skip


def _refused(scores: bytes) -> bytes:
    """The bytes, or noise if they happen to be good scores."""
    with suppress(WireError):
        decode_scores(scores)
        return b"noise"
    return scores


class RunDamages:
    """Damages to one run whose chunks have `rows` pairs each; each method is one.

    Parameters
    ----------
    client, rng
        The server, and what makes the choices.
    run_id, chunks, rows
        The run, its chunks and the pairs in each.
    """

    def __init__(self, client: Any, rng: random.Random, run_id: str, chunks: int, rows: int) -> None:
        self._client, self._rng, self._id, self._rows = client, rng, run_id, rows
        self._chunk = rows * rng.randrange(chunks)  # named by its first row
        self.altered: set[int] = set()
        """First rows of chunks whose pairs were damaged, and may have become other pairs."""
        self.all: list[Callable[[], None]] = [
            self.record, self.payload, self.bomb, self.job, self.result, self.result, self.any_key,
        ]  # fmt: skip

    def record(self) -> None:
        self._client.hset(keys.run(self._id), self._rng.choice(RUN_FIELDS), self._rng.choice(ANYTHING))

    def payload(self) -> None:
        """Mutate a chunk's pairs, or replace them by noise."""
        key = keys.pairs(self._id, self._chunk)
        self.altered.add(self._chunk)
        pairs = self._client.get(key) or b""
        noise = self._rng.random() < 0.3 or not pairs
        self._client.set(key, self._rng.choice(ANYTHING) if noise else mutated(pairs, self._rng), ex=60)

    def bomb(self) -> None:
        """Replace a chunk's pairs by a small payload that is large when it is read."""
        self.altered.add(self._chunk)
        self._client.set(keys.pairs(self._id, self._chunk), self._rng.choice(bombs()), ex=60)

    def job(self) -> None:
        key = Job.key_for(keys.job_id(self._id, self._chunk))
        name = self._rng.choice([b"data", *sorted(FIELDS)])
        value = self._rng.choice(datas() if name == b"data" else FIELDS[name])
        self._client.hset(key, name, value)
        self._client.expire(key, 60)

    def result(self) -> None:
        """Add an entry beside the good results."""
        key = keys.results(self._id)
        self._client.xadd(key, dict(bad_result(self._id, self._chunk, self._rows, self._rng)))
        self._client.expire(key, 60)

    def any_key(self) -> None:
        named = [
            keys.run,
            keys.results,
            keys.errors,
            keys.progress,
            keys.settled,
            keys.refusals,
        ]
        put(self._client, self._rng.choice(named)(self._id), self._rng)
