"""Sums up the usage of tenants (pairs, tokens, device time) by tenant, model or day, for tables, JSON and
metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from prometheus_client.metrics_core import CounterMetricFamily
from rich.table import Table

from rankmill.jobs.contract.priority import group_of
from rankmill.jobs.contract.results import NOTHING, Amounts
from rankmill.jobs.protocol.accounts import Entry
from rankmill.jobs.system import system

By = Literal["key", "model", "day"]

NOBODY = "(none)"
"""Shown as the tenant's name for runs without a tenant."""
OTHER = "(other)"
"""Shown as the tenant's or model's name for usage that did not fit into the account of a day."""

_NOBODY_GROUP = group_of("")
_LABELS = ("tenant", "model", "device")
_COUNTED = {
    "pairs": "Pairs that were scored, as producers have accepted their results.",
    "tokens": "Tokens of these pairs.",
    "device_seconds": "Seconds of the device that they took.",
    "cached_pairs": "Pairs of complete runs that took the score of another, or one that was known.",
    "failed_pairs": "Pairs of complete runs without a score.",
}


def tenant_of(entry: Entry) -> str:
    """Return the name of the tenant in an entry of usage, or `OTHER` if the entry stands for several tenants.

    If the name is unknown, return the digits that stand for the tenant in the ids of its runs.
    """
    if entry.other:
        return OTHER
    return entry.tenant or (NOBODY if entry.group == _NOBODY_GROUP else entry.group)


def summed(entries: Iterable[Entry], by: By) -> dict[tuple[str, str], Amounts]:
    """Sum up usage by device and by tenant, model or day, as `by` says."""
    sums: dict[tuple[str, str], Amounts] = {}
    for entry in entries:
        name = {"key": tenant_of(entry), "model": entry.model or OTHER, "day": entry.date}[by]
        place = name, entry.device
        sums[place] = sums.get(place, NOTHING).plus(entry.amounts)
    return dict(sorted(sums.items()))


def usage_table(entries: Iterable[Entry], by: By) -> Table:
    """Make a table of usage, with a line for each device of each tenant, model or day, as `by` says."""
    table = Table("" if by == "day" else by, "device", box=None, header_style="bold", pad_edge=False)
    for column in ("pairs", "tokens", "device seconds", "cached", "failed"):
        table.add_column(column, justify="right")
    for (name, device), total in summed(entries, by).items():
        seconds = f"{total.microseconds / 1e6:,.1f}"
        amounts = (f"{total.pairs:,}", f"{total.tokens:,}", seconds, f"{total.cached:,}", f"{total.failed:,}")
        table.add_row(name, device or "none", *amounts)
    return table


def listed(entries: Iterable[Entry], called: Callable[[str], str] = str) -> dict[str, Any]:
    """Return all entries of usage for JSON. `called` turns a model's name into the name to show."""
    data = [
        {
            "date": entry.date,
            "key": tenant_of(entry),
            "model": called(entry.model) if entry.model else OTHER,
            "device": entry.device or None,
            "pairs": entry.amounts.pairs,
            "tokens": entry.amounts.tokens,
            "device_seconds": entry.amounts.microseconds / 1e6,
            "cached": entry.amounts.cached,
            "failed": entry.amounts.failed,
        }
        for entry in entries
    ]
    return {"data": data}


class UsageMetrics:
    """Makes Prometheus counters of the tenants' usage. The counters begin at 0 with the first reading of the
    accounts.

    Each day has its own account. A reading adds how much each account has grown since the last reading, so
    the counters do not fall at midnight.
    """

    def __init__(self) -> None:
        self._lock = system.Lock()
        self._seen: dict[tuple[int, tuple[str, ...]], Amounts] | None = None
        self._totals: dict[tuple[str, ...], Amounts] = {}
        """The totals by tenant, model and device. A key has the tenant's digits in place of the name, because
        the name may become known only later.
        """
        self._names: dict[str, str] = {}

    def families(self, entries: Iterable[Entry] | None) -> Iterable[CounterMetricFamily]:
        """Return the counters of usage. If `entries` is ``None``, the usage is unknown, and the counters have
        no values.
        """
        counters = [
            CounterMetricFamily(f"rankmill_usage_{name}", text, labels=_LABELS)
            for name, text in _COUNTED.items()
        ]
        if entries is not None:
            for labels, total in self._count(entries).items():
                values = (total.pairs, total.tokens, total.microseconds / 1e6, total.cached, total.failed)
                for family, value in zip(counters, values, strict=True):
                    family.add_metric(labels, value)
        return counters

    def _count(self, entries: Iterable[Entry]) -> dict[tuple[str, ...], Amounts]:
        with self._lock:
            seen: dict[tuple[int, tuple[str, ...]], Amounts] = {}
            for entry in entries:
                if entry.tenant or entry.group not in self._names:
                    self._names[entry.group] = tenant_of(entry)
                place = entry.day, (entry.group, entry.model or OTHER, entry.device)
                seen[place] = seen.get(place, NOTHING).plus(entry.amounts)
            for (day, labels), amounts in seen.items():
                before = amounts if self._seen is None else self._seen.get((day, labels), NOTHING)
                # a server that has lost data may have less than before
                grown = Amounts(*(max(now - then, 0) for now, then in zip(amounts, before, strict=True)))
                self._totals[labels] = self._totals.get(labels, NOTHING).plus(grown)
            self._seen = seen
            return {(self._names[group], *rest): total for (group, *rest), total in self._totals.items()}
