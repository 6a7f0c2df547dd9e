"""docs/reference/redis.md: each key with its type and content, from the docstrings that name them."""

from __future__ import annotations

import inspect

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
    for name, what in vars(keys).items():
        if inspect.getmodule(what) is not keys or not inspect.isfunction(what) or name.startswith("_"):
            continue
        key = what(*(f"<{each}>" for each in inspect.signature(what).parameters))
        if str(key).startswith(keys.PREFIX):  # else it is of RQ, or several keys
            meaning = " ".join((what.__doc__ or "").split()).replace("``", "`").replace("|", "\\|")
            rows.append(f"| `{key}` | {meaning} |\n")
    return _INTRO + "".join(rows)
