"""The rows of a run that have no score, as its producer has noted them in Redis."""

from __future__ import annotations

from typing import Any

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.run import RowError


def read_row_errors(client: redis.Redis, run_id: str) -> tuple[list[RowError], int]:
    """The first rows without a score of a live run, and the number of damaged entries.

    Both together are at most `rankmill.jobs.contract.run.MAX_ROW_ERRORS`.
    """
    connection: Any = client
    found: dict[int, RowError] = {}
    damaged = 0
    for raw in connection.lrange(keys.errors(run_id), 0, -1):
        try:
            error = RowError.read_json(raw, "a row error")
        except WireError:
            damaged += 1
        else:
            found[error.row] = error  # a row may be listed twice, after a lost reply
    return list(found.values()), damaged
