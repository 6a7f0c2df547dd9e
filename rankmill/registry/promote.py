"""Promoting a version: live workers have it loaded before an alias stands for it."""

from __future__ import annotations

from collections.abc import Callable

import redis

from rankmill.cluster.orders import TAKE_CHUNKS, Outcome, order_workers, reachable
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract.errors import NoWorkers, RankmillError
from rankmill.jobs.registry.documents import Alias, Target
from rankmill.jobs.registry.names import Reference
from rankmill.jobs.registry.registry import Registry
from rankmill.registry.changes import set_alias


class NotWarm(RankmillError):
    """A worker has not loaded the version, so the alias stands for what it stood for."""


def promote(
    registry: Registry,
    alias: Reference,
    wanted: Target,
    client: redis.Redis,
    *,
    wait_seconds: float,
    on_outcome: Callable[[Outcome], None],
) -> Alias:
    """Let all live workers load the versions, then let the alias stand for them.

    Parameters
    ----------
    registry, alias, wanted
        The alias, and what it is to stand for.
    client
        The server whose workers load the versions.
    wait_seconds
        Longest wait for each version.
    on_outcome
        Told what each worker did.

    Raises
    ------
    NoWorkers
        There is no live worker.
    RegistryConflict
        The alias has the name of a version.
    NotWarm
        A worker did not load a version in time.
    """
    cluster = read_cluster(client, page_size=0)
    workers = [worker for worker in reachable(cluster.workers) if worker.state in TAKE_CHUNKS]
    if not workers:
        raise NoWorkers(
            f"there is no live worker to load {alias.name}", "rankmill models alias switches without that"
        )
    for version in wanted.named:
        model = f"{alias.name}@{version}"
        found = order_workers(client, workers, "warm", model, wait_seconds=wait_seconds)
        for outcome in found:
            on_outcome(outcome)
        late = [outcome for outcome in found if outcome.state in {"failed", "waiting"}]
        if late:
            raise NotWarm(
                f"{alias} stands for what it stood for: {len(late)} of {len(found)} workers have not loaded "
                f"{model} ({late[0].worker}: {late[0].text})"
            )
    return set_alias(registry, alias, wanted)
