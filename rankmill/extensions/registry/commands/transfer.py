"""``rankmill models push`` and ``pull``: copy versions into a registry and out of it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from rankmill.cli import options
from rankmill.cli.show import echo
from rankmill.extensions.registry.documents import parse_reference
from rankmill.extensions.registry.push import pull as pull_version
from rankmill.extensions.registry.push import push as push_version
from rankmill.extensions.registry.push import try_model
from rankmill.extensions.registry.registry import Registry, who
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.runtime.settings import Settings

_PUSHES = "the version is not in the registry; the same command continues"
_PULLS = "the folder was not made; the same command continues"


@options.command("push", interrupted=_PUSHES)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("name", metavar="NAME[@VERSION]")
@click.option("--notes", default="", metavar="TEXT", help="Notes on this version.")
@options.settings("registry", "max_length", "activation", "instruction", "prompt_template", "label")
@options.as_json
@options.quiet
def push(folder: Path, name: str, notes: str, settings: Settings, as_json: bool, quiet: bool) -> None:
    """Put the model in DIR into the registry.

    First, the model is loaded and scores some example pairs. Its weights must be *.safetensors, and its
    folder must not contain code. Without VERSION, the version gets the next of the names v1, v2, and so on.
    If the latest version has the same files, no new version is made. A version becomes visible when all of
    its files are there, and never changes: pushing the same files again does not change its notes. The same
    command continues an interrupted push.
    """
    registry = Registry.of(settings)
    model, _, version = name.partition("@")
    if "@" in name and not version:
        raise InputError(f"{name}: there is no version after the @")
    trial = partial(try_model, settings=settings)
    manifest, before = push_version(
        registry, folder, model, version or None, trial, by=who(), quiet=quiet, notes=notes
    )
    if as_json:
        echo(json.dumps({**manifest.model_dump(), "before": before}))
    elif not quiet:
        outcome = "was in the registry before" if before else "is in the registry"
        echo(f"{manifest} {outcome}: {len(manifest.files)} files, {manifest.bytes / 1e6:,.1f} MB")


@options.command("pull", interrupted=_PULLS)
@click.argument("model", metavar="NAME@VERSION")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@options.settings("registry")
@options.quiet
def pull(model: str, folder: Path | None, settings: Settings, quiet: bool) -> None:
    """Copy a version, or an alias's target, to a folder.

    DIR must be new, or empty and not the working directory. The default is NAME-VERSION in the working
    directory. Each file is verified. DIR appears when it is complete. The same command continues an
    interrupted pull.
    """
    registry = Registry.of(settings)
    version = registry.version(parse_reference(model))
    target = folder or Path(f"{version.name}-{version.tag}")
    pull_version(registry, registry.manifest(version), target, quiet=quiet)
    if not quiet:
        echo(f"{version} is in {target}")
