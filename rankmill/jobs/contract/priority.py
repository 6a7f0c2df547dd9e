"""The priority of a run, and its tenant: requests, whose caller waits for them, come before bulk work, and
tenants get equal parts, or parts by their weight.

The run's id carries both, so that each job's id does too: every queue of job ids can be kept in order.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple, cast, get_args

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.system import system

Priority = Literal["request", "bulk"]

REQUEST_ROWS = 256
"""A run of at most so many pairs is a request, unless the caller chooses."""

GROUP = 12
"""The last hexadecimal digits of an id, which stand for the tenant. People name runs by how ids begin."""

_MARK = "r"
"""First letter of a request's id, which is no hexadecimal digit; the rest of it, and a bulk run's id, are."""


def choose_priority(asked: str | None, rows: int | None) -> Priority:
    """The priority that was asked for; else that of a run of `rows` pairs (``None``: not known).

    Raises
    ------
    ConfigError
        There is no such priority.
    """
    if asked is None:
        return "request" if rows is not None and rows <= REQUEST_ROWS else "bulk"
    if asked not in get_args(Priority):
        raise ConfigError(f"priority: {asked!r:.40} is none; it is request or bulk")
    return cast("Priority", asked)


class Tenant(NamedTuple):
    """For whom a run is scored, and his weight: he gets this many times what one of weight 1 gets.

    Runs without a tenant have one together, whose name is empty.
    """

    name: str = ""
    weight: float = 1.0


NOBODY = Tenant()
"""The tenant of runs that have none."""


def group_of(tenant: str) -> str:
    """What stands for a tenant in the ids of his runs."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:GROUP]


def new_run_id(priority: Priority, tenant: str = "") -> str:
    """A new id for a run of this priority and tenant."""
    return (_MARK if priority == "request" else "") + system.unique_id()[GROUP:] + group_of(tenant)


def tenant_in(run_id: str) -> str:
    """What stands for the tenant in a run's id."""
    return run_id[-GROUP:]


def run_id_of_request(job_id: str) -> str:
    """The id that stands for a run where a job brings its own pairs; such a job is a request."""
    return _MARK + job_id


def priority_of(run_id: str) -> Priority:
    """The priority that a run's id carries."""
    return "request" if run_id.startswith(_MARK) else "bulk"
