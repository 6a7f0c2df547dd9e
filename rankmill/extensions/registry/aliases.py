"""Sets, promotes and rolls back aliases; lists and removes versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from rankmill.cluster.orders import TAKE_CHUNKS, OrderOutcome, order_workers, reachable
from rankmill.cluster.snapshot import read_cluster
from rankmill.extensions.registry.documents import (
    Alias,
    Manifest,
    Reference,
    Target,
    check_name,
    target_of,
    with_share,
)
from rankmill.extensions.registry.models import is_numbered
from rankmill.extensions.registry.registry import Registry
from rankmill.jobs.contract.errors import InputError, NoWorkers, RankmillError, RegistryConflict
from rankmill.jobs.system import system


def manifests(registry: Registry, name: str) -> list[Manifest]:
    """The manifests of all versions of a model."""
    return [registry.manifest(Reference(name, version)) for version in registry.versions(name)]


def called(manifest: Manifest, aliases: Mapping[str, Alias]) -> list[str]:
    """Return the aliases of a version, each with the version's part in it.

    - ``production``: the version gets all queries of this alias.
    - ``production 10%``: the version gets 10% of the queries.
    - ``production (shadow)``: the version is the shadow (see `Target`).
    """
    names = []
    for name, alias in aliases.items():
        share = alias.now.versions.get(manifest.version)
        if share is not None:
            names.append(with_share(name, share))
        elif manifest.version == alias.now.shadow:
            names.append(f"{name} (shadow)")
    return names


def version_view(manifest: Manifest, aliases: Mapping[str, Alias]) -> dict[str, Any]:
    """A version as JSON: its manifest, its size, and the aliases that stand for it."""
    return {**manifest.model_dump(), "bytes": manifest.bytes, "aliases": called(manifest, aliases)}


def target(
    registry: Registry, version: Reference, others: Mapping[str, float], shadow: str | None, *, by: str
) -> Target:
    """Make a target for an alias: one or several versions, with their shares of the queries.

    Parameters
    ----------
    registry, version
        The registry, and the version that gets the rest of the queries.
    others
        Shares of other versions, such as ``{"v4": 0.1}``.
    shadow
        A version that also scores all queries, but whose scores are not returned.
    by
        The person or API key that sets the alias.

    Raises
    ------
    NotInRegistry
        A version is not in the registry.
    InputError
        A name or a share is not valid, or the shares leave nothing for `version`.
    """
    rest = 1 - sum(others.values())
    if version.tag in others:
        raise InputError(f"{version} gets what is left of the shares; give those of the others")
    if rest <= 1e-9:
        raise InputError(f"the shares of {', '.join(others)} leave nothing for {version}")
    for name in [version.tag, *others, *([shadow] if shadow else [])]:
        registry.manifest(Reference(version.name, check_name(name, "a version")))
    shares = {version.tag: round(rest, 9), **others}
    return target_of(shares, shadow=shadow, by=by, at=system.now())


def set_alias(registry: Registry, reference: Reference, wanted: Target) -> Alias:
    """Create an alias, or change the versions that it stands for.

    Raises
    ------
    RegistryConflict
        The alias has the name of a version, even of a removed one, or a name like ``v1``.
    """
    if is_numbered(reference.tag) or reference.tag in registry.taken(reference.name):
        raise RegistryConflict(f"{reference} is the name of a version; an alias needs another")
    before = registry.find_alias(reference)
    alias = before.then(wanted) if before else Alias(now=wanted)
    registry.write_alias(reference, alias)
    return alias


def roll_back(registry: Registry, reference: Reference, *, by: str) -> Alias:
    """Undo the latest change of an alias; a second call undoes the change before it.

    Parameters
    ----------
    registry, reference
        The registry, and the names of the model and of the alias.
    by
        The person or API key that asks for this.

    Raises
    ------
    NotInRegistry
        The alias does not exist.
    RegistryConflict
        The alias has no recorded earlier target, or the latest of these names a version that no longer
        exists.
    """
    alias = registry.alias(reference)
    if not alias.before:
        raise RegistryConflict(
            f"{reference} stands for {alias.now}, the first of its targets that is kept, so it cannot go back"
        )
    last = alias.before[0]
    for version in last.named:
        if registry.find_manifest(Reference(reference.name, version)) is None:
            raise RegistryConflict(
                f"{reference} stood for {last}, and {version} is not in the registry any more: name a version"
            )
    now = last.model_copy(update={"by": by, "at": system.now()})
    back = Alias(now=now, before=alias.before[1:])
    registry.write_alias(reference, back)
    return back


def remove_version(
    registry: Registry, reference: Reference, client: redis.Redis | None, *, by: str
) -> Manifest:
    """Remove a version of a model from the registry.

    Parameters
    ----------
    registry, reference
        The registry, and the names of the model and of the version.
    client
        Redis server whose runs are checked: a version that one of them uses is not removed. With ``None``, no
        runs are checked.
    by
        The person or API key that removes the version.

    Raises
    ------
    NotInRegistry
        The version does not exist.
    RegistryConflict
        An alias stands for the version, or a live run uses it.
    """
    manifest = registry.manifest(reference)
    aliases = [
        name for name, alias in registry.aliases(reference.name).items() if reference.tag in alias.now.named
    ]
    if aliases:
        raise RegistryConflict(
            f"{reference} is what {', '.join(aliases)} stands for; let it stand for another first"
        )
    users = _live_runs(client, str(reference)) if client else []
    if users:
        raise RegistryConflict(
            f"{reference} is used by run {', '.join(users[:3])}; wait for its end, or cancel it"
        )
    removal = {"by": by, "at": system.now(), "content": manifest.content}
    registry.remove(reference, json.dumps(removal).encode())
    return manifest


def _live_runs(client: redis.Redis, model: str) -> Sequence[str]:
    cluster = read_cluster(client, page_size=_ALL_RUNS)
    submitted = [run for seen in cluster.extensions.values() for run in seen.runs()]
    users = [run.id for run in cluster.runs if run.model == model]
    return users + [run.id for run in submitted if run.model == model and run.state in {"waiting", "running"}]


_ALL_RUNS = 1_000_000


class NotWarm(RankmillError):
    """Raised by `promote` if a worker has not loaded the new version. The alias is unchanged."""


def promote(
    registry: Registry,
    alias: Reference,
    wanted: Target,
    client: redis.Redis,
    *,
    wait_seconds: float,
    on_outcome: Callable[[OrderOutcome], None],
) -> Alias:
    """Load new versions on all workers, then change an alias to stand for them.

    Parameters
    ----------
    registry, alias, wanted
        The registry, the alias, and its new target.
    client
        Redis server of the workers. Workers that take no chunks, such as drained ones, load nothing.
    wait_seconds
        Seconds within which the workers must load each version.
    on_outcome
        Called with the outcome at each worker.

    Raises
    ------
    NoWorkers
        No worker takes chunks.
    NotInRegistry
        A version does not exist.
    RegistryConflict
        The alias has the name of a version, even of a removed one, or a name like ``v1``.
    NotWarm
        A worker has failed to load a version, has not loaded it in time, or has ended meanwhile.
    """
    cluster = read_cluster(client, page_size=0)
    workers = [worker for worker in reachable(cluster.workers) if worker.state in TAKE_CHUNKS]
    if not workers:
        raise NoWorkers(
            f"there is no live worker to load {alias.name}", "rankmill models alias switches without that"
        )
    for version in wanted.named:
        model = f"{alias.name}@{version}"
        content = registry.manifest(Reference(alias.name, version)).content
        outcomes = order_workers(client, workers, "warm", model, content, wait_seconds=wait_seconds)
        for outcome in outcomes:
            on_outcome(outcome)
        late = [outcome for outcome in outcomes if outcome.state != "done"]
        # Do not leave out workers that have ended: loading the model may have killed them.
        if late:
            raise NotWarm(
                f"{alias} is unchanged: {len(late)} of {len(outcomes)} workers have not loaded "
                f"{model} ({late[0].worker}: {late[0].text})"
            )
    return set_alias(registry, alias, wanted)
