"""``rankmill models list`` and ``show``: show what is in a registry."""

from __future__ import annotations

import json
from datetime import datetime

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rankmill.cli import options
from rankmill.cli.show import console, echo
from rankmill.extensions.registry.aliases import called, manifests, version_view
from rankmill.extensions.registry.documents import Alias, Manifest, Reference, parse_reference
from rankmill.extensions.registry.registry import Registry
from rankmill.jobs.contract.errors import NotInRegistry
from rankmill.jobs.runtime.settings import Settings


@options.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@options.settings("registry")
@options.as_json
def list_models(names: tuple[str, ...], settings: Settings, as_json: bool) -> None:
    """List the models of the registry, their versions and aliases."""
    registry = Registry.of(settings)
    listed = {name: manifests(registry, name) for name in names or registry.models()}
    if missing := [name for name in names if not listed[name]]:
        why = f"the registry {registry.url} has no model {missing[0]}"
        raise NotInRegistry(f"{why}; rankmill models list shows all")
    aliases = {name: registry.aliases(name) for name in listed}
    if as_json:
        views = [version_view(manifest, aliases[name]) for name in listed for manifest in listed[name]]
        echo(json.dumps(views))
        return
    table = Table("version", "aliases", "family", "size", "pushed", "by", "notes", box=SIMPLE_HEAD)
    for name, versions in listed.items():
        for manifest in versions:
            known_as, notes = ", ".join(called(manifest, aliases[name])), manifest.notes.partition("\n")[0]
            size, pushed = f"{manifest.bytes / 1e6:,.1f} MB", _when(manifest.at)
            table.add_row(str(manifest), known_as, manifest.family, size, pushed, manifest.by, notes)
    console().print(table)


@options.command("show")
@click.argument("model", metavar="NAME@VERSION")
@options.settings("registry")
@options.as_json
def show(model: str, settings: Settings, as_json: bool) -> None:
    """Show files, author and time of a version or an alias."""
    registry = Registry.of(settings)
    named = parse_reference(model)
    alias = registry.find_alias(named)
    shares = alias.now.versions if alias else {named.tag: 1.0}
    largest = max(shares, key=lambda version: shares[version])
    manifest = registry.manifest(Reference(named.name, largest))
    aliases = registry.aliases(named.name)
    if as_json:
        echo(json.dumps(version_view(manifest, aliases)))
        return
    if alias is not None:
        echo(f"{named} stands for {alias.now}, since {_when(alias.now.at)}, by {alias.now.by}")
        for before in alias.before:
            echo(f"  before: {before}, since {_when(before.at)}, by {before.by}")
    echo("\n".join(_lines(manifest, aliases)))


def _lines(manifest: Manifest, aliases: dict[str, Alias]) -> list[str]:
    lines = [
        f"version  {manifest}",
        f"aliases  {', '.join(called(manifest, aliases)) or 'none'}",
        f"family   {manifest.family}",
        f"pushed   {_when(manifest.at)} by {manifest.by}",
        f"content  {manifest.content}",
    ]
    lines += [f"notes    {line}" for line in manifest.notes.splitlines()]
    width = max(len(file.path) for file in manifest.files)
    lines += [f"file     {file.path:<{width}}  {file.bytes:>14,}  {file.sha256}" for file in manifest.files]
    return lines


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M")
