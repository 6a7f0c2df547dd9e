"""``rankmill keys``: who may use the gateway, and how much."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import click

from rankmill.cli import options
from rankmill.cluster.tables import duration
from rankmill.gateway.keys.api_keys import ApiKey, KeyStore
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.runtime.settings import Settings


@click.group(context_settings=options.CONTEXT)
def keys() -> None:
    """Make, list and revoke the API keys of the gateway."""


@options.command("create")
@click.argument("name")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model that it may use, with all its versions; repeat it for several.  [default: all]",
)
@click.option(
    "--pairs-per-minute",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most pairs in a minute, batches not counted.  [default: no limit]",
)
@click.option(
    "--requests-at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most requests in progress.  [default: no limit]",
)
@click.option(
    "--priority",
    type=click.Choice(get_args(Priority)),
    help="Priority of its requests.  [default: request up to 256 pairs, else bulk]",
)
@click.option(
    "--days",
    type=click.FloatRange(min=0, min_open=True, max=36500),
    default=365,
    show_default=True,
    metavar="N",
    help="Days until it expires.",
)
@click.option("--admin", is_flag=True, help="It may load and unload models, and see everybody's files.")
@click.option(
    "--manage-models",
    is_flag=True,
    help="It may push models into the registry, set aliases and remove; with --model, those models only.",
)
@options.settings("redis_url")
@options.as_json
def create(name: str, settings: Settings, as_json: bool, **allowed: Any) -> None:
    """Make a key and print it: it cannot be shown again.

    NAME says whose it is, in metrics and logs. Keys of one name share their limits, files and batches: to
    replace a key, make another of its name, and revoke the first by its id.
    """
    allowed["models"] = allowed["models"] or None
    text, key = _store(settings).create(name, **allowed)
    click.echo(json.dumps({"key": text, **_shown(key)}) if as_json else text)


@options.command("list")
@options.settings("redis_url")
@options.as_json
def list_keys(settings: Settings, as_json: bool) -> None:
    """List the keys, without their texts."""
    found = _store(settings).all()
    if as_json:
        click.echo(json.dumps([_shown(key) for key in found]))
        return
    for key in found:
        click.echo(f"{key.id}  {key.name}: {_line(key)}")


@options.command("revoke")
@click.argument("wanted", metavar="KEY...", nargs=-1, required=True)
@options.settings("redis_url")
def revoke(wanted: tuple[str, ...], settings: Settings) -> None:
    """Delete keys, at once; requests and batches in progress are finished.

    KEY is the id of one key, or a name: of all keys of this name.
    """
    for key_id in _store(settings).revoke(wanted):
        click.echo(f"{key_id} is revoked")


for _command in (create, list_keys, revoke):
    keys.add_command(_command)


def _store(settings: Settings) -> KeyStore:
    return KeyStore(options.connection(settings))


def _shown(key: ApiKey) -> dict[str, object]:
    """What a key allows, without anything that leads to its text."""
    return key.model_dump(exclude={"digest"})


def _line(key: ApiKey) -> str:
    limits = {
        "pairs a minute": key.pairs_per_minute,
        "requests at once": key.requests_at_once,
    }
    return ", ".join(
        [
            "all models" if key.models is None else f"models {' '.join(key.models)}",
            *(f"{most:,} {what}" for what, most in limits.items() if most),
            *([f"priority {key.priority}"] if key.priority else []),
            *(["admin"] if key.admin else []),
            *(["manages models"] if key.manage_models else []),
            f"expires in {duration(key.expires - time.time())}",
        ]
    )
