"""``rankmill keys``: make, list and revoke the API keys of the gateway."""

from __future__ import annotations

import json
from typing import Annotated

import click
from pydantic import Field

from rankmill.cli import options
from rankmill.cli.common import CONTEXT
from rankmill.cli.show import echo
from rankmill.cluster.tables import duration
from rankmill.extensions.gateway.keys.api_keys import ApiKey, KeyStore
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system


@click.group(context_settings=CONTEXT)
def keys() -> None:
    """Make, list and revoke the API keys of the gateway."""


class KeyOptions(options.CommandOptions):
    """The rights of a key."""

    models: Annotated[tuple[str, ...], Field(title="NAME")] = Field((), alias="model")
    """A model that the key may use, with all its versions; repeat the option for several.  [default: all]"""
    pairs_per_minute: options.Number | None = None
    """Limit of pairs a minute, and so of pairs in a request; batches do not count. [default: no limit]"""
    requests_at_once: options.Number | None = None
    """The key's limit of requests in progress at a time.  [default: no limit]"""
    weight: Annotated[float, Field(gt=0, le=1e6, title="N")] = 1
    """Weight of NAME while pairs of several owners wait: weight 2 gets twice the pairs of weight 1."""
    priority: Priority | None = None
    """Priority of the key's requests.  [default: request for up to 256 pairs, else bulk]"""
    days: Annotated[float, Field(gt=0, le=36500, title="N")] = 365
    """Days until the key expires."""
    admin: bool = False
    """Let the key load and unload models, read metrics and all usage, and use all files and batches."""
    manage_models: bool = False
    """Let the key push models into the registry, set aliases and remove versions. If --model is given, this
    right is for these models only.
    """


@options.command("create")
@click.argument("name")
@options.of(KeyOptions)
@options.settings("redis_url")
@options.as_json
def create(name: str, asked: KeyOptions, settings: Settings, as_json: bool) -> None:
    """Make a key and print it; it cannot be shown again.

    NAME is the key's owner in metrics and logs. Keys of one name share their limits, files and batches. To
    replace a key, make another one with its name, and revoke the first one by its id.
    """
    allowed = {**asked.model_dump(), "models": asked.models or None}
    text, key = _store(settings).create(name, **allowed)
    echo(json.dumps({"key": text, **_shown(key)}) if as_json else text)


@options.command("list")
@options.settings("redis_url")
@options.as_json
def list_keys(settings: Settings, as_json: bool) -> None:
    """List the keys, without their texts."""
    api_keys = _store(settings).all()
    if as_json:
        echo(json.dumps([_shown(key) for key in api_keys]))
        return
    if not api_keys:
        echo("No keys.")
    for key in api_keys:
        echo(f"{key.id}  {key.name}: {_line(key)}")


@options.command("revoke")
@click.argument("wanted", metavar="KEY...", nargs=-1, required=True)
@options.settings("redis_url")
def revoke(wanted: tuple[str, ...], settings: Settings) -> None:
    """Delete keys immediately; requests and batches in progress are finished.

    KEY is the id of one key, or a name: then all keys of this name are deleted.
    """
    for key_id in _store(settings).revoke(wanted):
        echo(f"{key_id} is revoked")


for _command in (create, list_keys, revoke):
    keys.add_command(_command)


def _store(settings: Settings) -> KeyStore:
    return KeyStore(options.connection(settings))


def _shown(key: ApiKey) -> dict[str, object]:
    return key.model_dump(exclude={"digest"})


def _line(key: ApiKey) -> str:
    limits = {
        "pairs a minute": key.pairs_per_minute,
        "requests at once": key.requests_at_once,
    }
    return ", ".join(
        [
            "all models" if key.models is None else f"models {' '.join(key.models)}",
            *(f"{most:,} {unit}" for unit, most in limits.items() if most),
            *([f"priority {key.priority}"] if key.priority else []),
            *([f"weight {key.weight:g}"] if key.weight != 1 else []),
            *(["admin"] if key.admin else []),
            *(["manages models"] if key.manage_models else []),
            f"expires in {duration(key.expires - system.now())}",
        ]
    )
