"""Accounts of the pairs, tokens and device time that each tenant has used in the last 400 days, by day, model
and device.

Each result is counted once, even if a transaction is repeated: the script that counts a result also deletes
its entry from the run's stream. If the entry has to stay, the script records that it is counted. Nothing
restores accounts that the server has lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.priority import group_of, tenant_in
from rankmill.jobs.contract.results import NOTHING, Amounts, Usage
from rankmill.jobs.contract.run import Run
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.runtime.patience import each_reply
from rankmill.jobs.system import system

KEPT_DAYS = 400

MOST_ENTRIES = 2000
"""The accounts of a day have at most this many entries, one for each tenant, model and device. Usage that
would need further entries is added up in one extra entry.
"""

_DAY = 86400
_NAMES = 10_000

_LONGEST = 200

_COUNT = Script("jobs/protocol/lua/count.lua")

END = "end"
"""Some usage is known only when a run ends, and belongs to no stream entry. This stands in place of the
entry's id.
"""


class Entry(NamedTuple):
    """A tenant's usage of a model on a device on one day.

    Attributes
    ----------
    day
        Days since 1970, in UTC.
    group
        The digits that stand for the tenant in the ids of its runs.
    other
        Whether this entry is the sum of all usage beyond `MOST_ENTRIES`. If so, its group, tenant, model and
        device are empty.
    """

    day: int
    group: str
    tenant: str
    model: str
    device: str
    amounts: Amounts
    other: bool = False

    @property
    def date(self) -> str:
        return str(datetime.fromtimestamp(self.day * _DAY, UTC).date())


class Accountant:
    """Adds what runs use (pairs, tokens, device time) to the accounts of their tenants in Redis.

    Threads may share the object.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def know(self, tenant: str) -> None:
        if tenant:
            self._names[group_of(tenant)] = tenant
            if len(self._names) > _NAMES:
                del self._names[next(iter(self._names))]

    def count(
        self, pipe: Any, run: Run, used: Mapping[str, Usage], *, group: str | None = None, stays: bool = False
    ) -> None:
        """Add a command to `pipe` that counts the usage of results, and deletes their entries from the
        stream.

        Parameters
        ----------
        pipe
            The pipeline.
        run
            The run that the results belong to.
        used
            Usage of each result, by the id of its stream entry. The id `END` also deletes the whole stream.
        group
            The digits that stand for the tenant. By default, they are taken from the end of the run's id.
        stays
            Whether the entries stay in the stream. If so, a set records which ids are counted.
        """
        parts: list[object] = []
        for entry, usage in used.items():
            parts += [entry, len(usage)]
            for device, amounts in usage.items():
                parts += [_plain(device), *amounts]
        if not parts:
            return
        where = keys.counted(run.id) if stays else keys.results(run.id)
        group = group or tenant_in(run.id)
        facts = [KEPT_DAYS * _DAY, MOST_ENTRIES, group, self._names.get(group, ""), run.spec.model[:_LONGEST]]
        # the script adds the day to the key, by the server's clock
        _COUNT.run(pipe, [where, keys.usage("")], "SADD" if stays else "XDEL", *facts, *parts)
        if stays:
            pipe.expire(where, run.ttl)


def _plain(device: str) -> str:
    return device.replace("|", " ")[:_LONGEST]


def read_accounts(client: redis.Redis, days: int, tenant: str | None = None) -> list[Entry]:
    """Read the tenants' usage of the last `days` days from Redis, including today.

    With `tenant`, return only this tenant's usage.
    """
    today = int(system.now() // _DAY)
    wanted = range(today - min(days, KEPT_DAYS) + 1, today + 1)
    replies = each_reply(client, [("hgetall", keys.usage(day)) for day in wanted])
    entries = [
        entry for day, raw in zip(wanted, replies, strict=True) for entry in _entries(day, _texts(raw))
    ]
    names = {entry.group: entry.tenant for entry in entries if entry.tenant}
    entries = [entry._replace(tenant=names.get(entry.group, entry.tenant)) for entry in entries]
    if tenant is not None:
        entries = [entry for entry in entries if entry.group == group_of(tenant) and not entry.other]
    return entries


def _texts(raw: Any) -> dict[str, str]:
    if not isinstance(raw, dict):
        return {}
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}


def _entries(day: int, fields: dict[str, str]) -> Iterable[Entry]:
    for name, value in fields.items():
        numbers = value.split(" ")
        if len(numbers) != len(NOTHING) or not all(number.isdecimal() for number in numbers):
            continue
        amounts = Amounts(*map(int, numbers))
        if name == "other":
            yield Entry(day, "", "", "", "", amounts, other=True)
        elif name.count("|") >= 2:
            group, device, model = name.split("|", 2)
            yield Entry(day, group, fields.get(f"name|{group}", ""), model, device, amounts)
