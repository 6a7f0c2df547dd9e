"""docs/reference/redis.md: each key with its type and content, from the docstrings that name them."""

from __future__ import annotations

import inspect

from rankmill.extensions.batches import redis_keys as of_batches
from rankmill.extensions.gateway import redis_keys as of_gateways
from rankmill.extensions.runners import redis_keys as of_runners
from rankmill.jobs.contract import keys

_INTRO = """\
# Redis keys

Each of these keys expires; [the architecture](../explanation/architecture.md#redis-keys) says when.
RQ keeps its own keys, `rq:…`: jobs and their results expire, the lists of its queues and workers do not.

This page is made from the code (`python -m tests.harness.reference`).

| key | content |
| --- | --- |
"""


def page() -> str:
    """The page."""
    rows = []
    modules = (keys, of_runners, of_gateways, of_batches)
    named = [
        what for module in modules for what in vars(module).values() if inspect.getmodule(what) is module
    ]
    for what in filter(inspect.isfunction, named):
        key = what(*(f"<{each}>" for each in inspect.signature(what).parameters))
        if str(key).startswith(keys.PREFIX):  # else it is of RQ, or several keys
            meaning = " ".join((what.__doc__ or "").split()).replace("``", "`").replace("|", "\\|")
            rows.append(f"| `{key}` | {meaning} |\n")
    return _INTRO + "".join(rows)
