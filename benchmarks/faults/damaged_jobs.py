"""Makes damaged jobs that cannot be read, for the tests and for `benchmarks.faults.fuzz`."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

from rq.job import Job

DATES = [b"", b"yesterday", b"2026-13-45T99:99:99Z", b"\xff\xfe", b"1e400", b"99999999999999999999"]
NUMBERS = [b"", b"ten", b"-1", b"-99", b"1e9", b"nan", b"9" * 400, b"\x00", b"3.5", b"0x10", "٣".encode()]
JSONS = [
    b"",
    b"null",
    b"[]",
    b"7",
    b"{",
    b'"text"',
    b"[1,2,3]",
    b"\xff",
    b"[" * 9000,
    b'{"suspect": {}}',
    b"true",
]
TEXTS = [b"", b"\xff\xfe", b"other", b"\x00" * 50, b"a" * 10_000]

FIELDS: dict[bytes, list[bytes]] = {
    **dict.fromkeys([b"created_at", b"enqueued_at", b"started_at", b"ended_at", b"last_heartbeat"], DATES),
    **dict.fromkeys([b"timeout", b"result_ttl", b"failure_ttl", b"ttl", b"retries_left"], NUMBERS),
    **dict.fromkeys([b"number_of_retries", b"repeats_left", b"enqueue_at_front"], NUMBERS),
    **dict.fromkeys([b"success_callback_timeout", b"allow_dependency_failures"], NUMBERS),
    **dict.fromkeys(
        [b"meta", b"retry_intervals", b"dependency_ids", b"webhooks", b"repeat_intervals"], JSONS
    ),
    **dict.fromkeys([b"origin", b"status", b"worker_name", b"description", b"group_id", b"exc_info"], TEXTS),
    **dict.fromkeys([b"success_callback_name", b"rate_limit_key", b"dependency_id", b"result"], TEXTS),
    b"rate_limit_concurrency": NUMBERS,
}

CALLS: list[Any] = [
    None,
    [],
    7,
    "text",
    ["rankmill.score_chunk"],
    ["rankmill.score_chunk", None, [], {}],
    ["rankmill.score_chunk", None, "arguments", {}],
    ["rankmill.score_chunk", None, ["run", "0"], {}],
    ["rankmill.score_chunk", None, ["run", -1], {}],
    ["rankmill.score_chunk", None, ["run", 10**30], {}],
    ["rankmill.score_chunk", None, [["run"], 0], {}],
    ["rankmill.score_chunk", None, ["run", 0], {"chunk": 1}],
    ["rankmill.score_chunk", None, ["run", 0], []],
    ["rankmill.score_pairs", None, [[["q", "p"]]], {"model": 5}],
    ["rankmill.score_pairs", None, [[["q", {}]]], {"model": "demo"}],
    ["rankmill.score_pairs", None, "arguments", {}],
    ["rankmill.score_pairs", None, [], {"pairs": {}}],
    [None, None, ["run", 0], {}],
    ["os.system", None, ["true"], {}],
    [["a"], {}, 1, 2, 3],
]


def datas() -> list[bytes]:
    """Invalid forms of the part of a job that names its function."""
    calls = [zlib.compress(json.dumps(call).encode()) for call in CALLS]
    return [*calls, *JSONS, zlib.compress(b"\xff"), zlib.compress(b" " * (8 << 20)), b"\x80\x04."]


def damage(fields: dict[bytes, bytes], rng: random.Random) -> dict[bytes, bytes]:
    """The hash of a job with a random damage, or unchanged."""
    found = dict(fields)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if rng.random() < 0.25:
            found[b"data"] = rng.choice(datas())
        elif rng.random() < 0.1:
            found.pop(rng.choice(sorted(found)))
        else:
            name = rng.choice(sorted(FIELDS))
            found[name] = rng.choice(FIELDS[name])
    return found or {b"": b""}


def put_damaged(client: Any, queue: str, fields: dict[bytes, bytes], rng: random.Random) -> bytes:
    """Put a damaged job at the front of a queue; returns its id."""
    number = rng.getrandbits(60)
    job_id = rng.choice([f"damaged-{number}".encode(), b"\xff%x" % number, b"a b:%x" % number])
    key = Job.redis_job_namespace_prefix.encode() + job_id
    kind = rng.random()
    if kind < 0.1:
        client.set(key, b"no hash", ex=60)
    elif kind < 0.9:
        client.hset(key, mapping=damage(fields, rng))
        client.expire(key, 60)
    client.lpush(f"rq:queue:{queue}", job_id)
    return job_id


def put_leases(client: Any, queue: str, job_id: bytes, rng: random.Random) -> None:
    """Damage RQ's other keys about jobs (not their hashes)."""
    now = 1.0 if rng.random() < 0.5 else 1e12
    client.zadd(f"rq:wip:{queue}", {rng.choice([job_id, job_id + b":x", b"\xff:\xff", b":", b"a:b:c"]): now})
    client.zadd(f"rq:scheduled:{queue}", {rng.choice([job_id, b"\xff", b""]): 1})
    client.rpush(f"rq:queue:{queue}:intermediate", rng.choice([job_id, b"\xff", b""]))
    client.set(
        b"rq:queue:%s:intermediate:first_seen:%s" % (queue.encode(), job_id), rng.choice(NUMBERS), ex=60
    )
    client.zadd(b"rq:executions:" + job_id, {rng.choice([b"x", b"\xff"]): 1e12})
    client.expire(b"rq:executions:" + job_id, 60)
    client.sadd(f"rq:workers:{queue}", rng.choice([b"\xff", b"rq:worker:gone", b"odd"]))
