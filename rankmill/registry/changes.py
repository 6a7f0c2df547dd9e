"""Changes to what a registry shows: aliases are set and rolled back, versions are removed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import redis

from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract.errors import InputError, NotInRegistry, RegistryConflict
from rankmill.jobs.registry.documents import Alias, Manifest, Target, target_of
from rankmill.jobs.registry.names import Reference, check_name
from rankmill.jobs.registry.registry import Registry
from rankmill.jobs.registry.resolver import is_numbered


def target(
    registry: Registry, version: Reference, others: Mapping[str, float], shadow: str | None, *, by: str
) -> Target:
    """What `by` lets an alias stand for: `version` with the share that `others` leave, and a shadow.

    Raises
    ------
    NotInRegistry
        A version is not in the registry.
    InputError
        The shares leave nothing.
    """
    rest = 1 - sum(others.values())
    if version.tag in others:
        raise InputError(f"{version} gets what is left of the shares; give those of the others")
    if rest <= 1e-9:
        raise InputError(f"the shares of {', '.join(others)} leave nothing for {version}")
    for each in [version.tag, *others, *([shadow] if shadow else [])]:
        registry.manifest(Reference(version.name, check_name(each, "a version")))
    shares = {version.tag: round(rest, 9), **others}
    return target_of(shares, shadow=shadow, by=by, at=time.time())


def set_alias(registry: Registry, reference: Reference, wanted: Target) -> Alias:
    """Let an alias stand for `wanted` from now on.

    Raises
    ------
    RegistryConflict
        There is a version of that name.
    """
    if is_numbered(reference.tag) or reference.tag in registry.taken(reference.name):
        raise RegistryConflict(f"{reference} is the name of a version; an alias needs another")
    before = registry.find_alias(reference)
    alias = before.then(wanted) if before else Alias(now=wanted)
    registry.write_alias(reference, alias)
    return alias


def roll_back(registry: Registry, reference: Reference, *, by: str) -> Alias:
    """Let an alias stand for what it stood for before; once more goes one further back. `by`: who does it.

    Raises
    ------
    NotInRegistry
        There is no such alias.
    RegistryConflict
        It has stood for nothing else, or that is not there any more.
    """
    alias = registry.find_alias(reference)
    if alias is None:
        raise NotInRegistry(f"the registry {registry.url} has no alias {reference}")
    if not alias.before:
        raise RegistryConflict(f"{reference} has stood for nothing but {alias.now}")
    last = alias.before[0]
    for version in last.named:
        if registry.find_manifest(Reference(reference.name, version)) is None:
            raise RegistryConflict(
                f"{reference} stood for {last}, and {version} is not in the registry any more"
            )
    now = last.model_copy(update={"by": by, "at": time.time()})
    back = Alias(now=now, before=alias.before[1:])
    registry.write_alias(reference, back)
    return back


def remove_version(
    registry: Registry, reference: Reference, client: redis.Redis | None, *, by: str
) -> Manifest:
    """Remove a version.

    Parameters
    ----------
    registry, reference
        The version.
    client
        A server whose runs may use it.
    by
        Who removes it.

    Raises
    ------
    NotInRegistry
        There is no such version.
    RegistryConflict
        An alias stands for it, or a live run uses it.
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
    about = {"by": by, "at": time.time(), "content": manifest.content}
    registry.remove(reference, json.dumps(about).encode())
    return manifest


def _live_runs(client: redis.Redis, model: str) -> Sequence[str]:
    found: list[str] = []
    page, total = 0, 1
    while page * _PAGE < total:
        cluster = read_cluster(client, page=page, page_size=_PAGE)
        found += [run.id for run in cluster.runs if run.model == model]
        page, total = page + 1, cluster.runs_total
    return found


_PAGE = 500
