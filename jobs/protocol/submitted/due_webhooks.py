"""Webhooks that are not delivered yet: which run's is due, and what became of an attempt."""

from __future__ import annotations

import time

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunExpired, WireError
from rankmill.jobs.protocol.submitted import scripts
from rankmill.jobs.protocol.submitted.record import FileRun
from rankmill.jobs.protocol.submitted.store import FileRunStore

_SECONDS = 120
"""Seconds after which another runner takes a webhook from one that may have died."""


def take_webhook(store: FileRunStore) -> FileRun | None:
    """An ended run whose webhook is due; no other process gets it for two minutes."""
    key = keys.webhooks(store.queue.name)
    raw = store.redis.eval(scripts.TAKE_WEBHOOK, 1, key, _SECONDS)
    if raw is None:
        return None
    try:
        return store.load(raw.decode(errors="replace"))
    except (WireError, RunExpired):
        store.redis.zrem(key, raw)
        return None


def note_webhook(store: FileRunStore, run: FileRun, after: float | None) -> None:
    """Write what became of an attempt at a webhook, and try again `after` so many seconds, if at all."""
    key = keys.webhooks(store.queue.name)
    with store.redis.pipeline() as pipe:
        pipe.set(keys.file_run(run.id), run.written(), ex=store.ttl)
        if after is None:
            pipe.zrem(key, run.id)
        else:
            pipe.zadd(key, {run.id: time.time() + after})
        pipe.execute()
