"""The priority and the tenant of a run, which are both part of the run's id.

Requests come before bulk work, because their callers wait for them. A tenant's weight decides its share of
the workers. The ids of a run's jobs begin with the run's id, so a job's id is enough to find its place in a
queue.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple, cast, get_args

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.system import system

Priority = Literal["request", "bulk"]

REQUEST_ROWS = 256
"""A run of at most this many rows is a request, and a larger run is bulk work. Callers can choose otherwise.
"""

GROUP = 12
"""Number of hexadecimal digits at the end of a run's id that stand for the tenant. The tenant's digits are at
the end because users name runs by the beginnings of ids.
"""

_MARK = "r"
"""First letter of a request's id; the ids of bulk runs have only hexadecimal digits."""


def choose_priority(given: str | None, rows: int | None) -> Priority:
    """Return the priority of a run: the caller's choice, or else the usual one for its number of rows.

    Parameters
    ----------
    given
        The caller's choice; ``None`` without a choice.
    rows
        Number of rows; ``None`` if unknown, which means bulk work.

    Raises
    ------
    ConfigError
        The given priority does not exist.
    """
    if given is None:
        return "request" if rows is not None and rows <= REQUEST_ROWS else "bulk"
    if given not in get_args(Priority):
        raise ConfigError(f"priority: {given!r:.40} does not exist; name request or bulk")
    return cast("Priority", given)


class Tenant(NamedTuple):
    """A user or group for which runs are scored. Its weight decides its share of the workers.

    With weight 2.0, a tenant's share is twice as large as with 1.0. All runs without a tenant share the
    tenant whose name is empty.
    """

    name: str = ""
    weight: float = 1.0


NOBODY = Tenant()


def group_of(tenant: str) -> str:
    """The digits that stand for a tenant in the ids of its runs."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:GROUP]


def new_run_id(priority: Priority, tenant: str = "") -> str:
    """Make a new id for a run with this priority and tenant."""
    return (_MARK if priority == "request" else "") + system.unique_id()[GROUP:] + group_of(tenant)


def tenant_in(run_id: str) -> str:
    """The digits that stand for the tenant in a run's id."""
    return run_id[-GROUP:]


def run_id_of_request(job_id: str) -> str:
    """Make a run id for a job that contains its own pairs. Such a job is scored as a request."""
    return _MARK + job_id


def priority_of(run_id: str) -> Priority:
    """Return the priority of a run, from the first letter of its id."""
    return "request" if run_id.startswith(_MARK) else "bulk"
