"""``rankmill config``: what the settings are, where each comes from, and their schema for editors."""

from __future__ import annotations

import json
from typing import Any

import click
import yaml

from jobs.runtime.passwords import mask_passwords, mask_url
from jobs.runtime.settings import Settings, merge_settings, validate
from rankmill.cli import options


@click.group(context_settings=options.CONTEXT)
def config() -> None:
    """Show and describe settings."""


@options.command("show")
@options.settings()
def show(config: str | None) -> None:
    """Print every setting, merged as a command would, and where it was set.

    What is printed is a config file: a file's name or 'the environment' stands behind each value.
    """
    merged = merge_settings(config=config)
    settings = validate(merged)
    if settings.redis_url:
        settings = settings.model_copy(update={"redis_url": mask_url(settings.redis_url)})
    lines = [yaml.safe_dump({key: getattr(settings, key)}).strip() for key in merged]
    width = max(map(len, lines))
    for key, line in zip(merged, lines, strict=True):
        click.echo(mask_passwords(f"{line:<{width}}  # {merged[key].source}"))


@options.command("schema")
def schema() -> None:
    """Print the JSON schema of config files, as in configs/schema.json."""
    click.echo(json.dumps(config_schema(), indent=2))


for command in (show, schema):
    config.add_command(command)


def config_schema() -> dict[str, Any]:
    """The JSON schema of a config file: any of the settings, and ``extends``."""
    found = Settings.model_json_schema()
    found["title"] = "rankmill config file"
    found["properties"]["extends"] = {"type": "string", "title": "Config file that this one changes"}
    del found["required"]
    return found
