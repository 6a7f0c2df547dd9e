"""What waits in a queue, wherever its jobs wait."""

from __future__ import annotations

from typing import Any

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.runs import RunStore


def lists(client: redis.Redis, queue: str = "rankmill") -> list[str]:
    """The keys under which jobs wait: those of requests, of bulk runs, and RQ's."""
    found: Any = client.keys(f"{keys.of_queue(queue)}waiting:*")
    ours = sorted((key.decode() for key in found), key=lambda key: (":requests:" not in key, key))
    return [*ours, f"rq:queue:{queue}"]


def waiting_jobs(client: redis.Redis, queue: str = "rankmill") -> list[str]:
    """The ids of the jobs that wait: requests, then bulk runs, each in its order."""
    connection: Any = client
    return [
        raw.decode(errors="replace") for key in lists(client, queue) for raw in connection.lrange(key, 0, -1)
    ]


def lose_waiting(client: redis.Redis, queue: str = "rankmill") -> None:
    """Delete all lists in which jobs wait, as if the server had lost them."""
    client.delete(*lists(client, queue))


def take_out(client: redis.Redis, job_id: str, queue: str = "rankmill") -> None:
    """Take a job out of its list, as the worker that begins it."""
    connection: Any = client
    for key in (RunStore(client).queue(queue).waiting_list(job_id), f"rq:queue:{queue}"):
        connection.lrem(key, 0, job_id)
