"""``rankmill config``: print the settings and their sources, and the JSON schema for editors."""

from __future__ import annotations

import json
from typing import Any

import click
import yaml

from rankmill.cli import options
from rankmill.cli.common import CONTEXT
from rankmill.jobs.runtime.passwords import mask_passwords, mask_url
from rankmill.jobs.runtime.settings import Settings, extension_settings, merge_settings, validate


@click.group(context_settings=CONTEXT)
def config() -> None:
    """Show and describe settings."""


@options.command("show")
@options.flags()
def show(config: str | None) -> None:
    """Print every setting as a command would use it, and its source.

    The output is a config file. A comment after each value names its source, which is a file or the
    environment.
    """
    merged = merge_settings(config=config)
    settings = validate(merged)
    if settings.redis_url:
        settings = settings.model_copy(update={"redis_url": mask_url(settings.redis_url)})
    parts = [settings, *(settings.of(model) for model in dict.fromkeys(extension_settings().values()))]
    values = {key: getattr(part, key) for part in parts for key in type(part).model_fields}
    shown = [key for key in merged if key in values]
    lines = [_line(key, values[key]) for key in shown]
    width = max(map(len, lines))
    for key, line in zip(shown, lines, strict=True):
        click.echo(mask_passwords(f"{line:<{width}}  # {merged[key].source}"))


def _line(key: str, value: object) -> str:
    flow = None if isinstance(value, tuple) else False  # `None` writes a list on one line: `key: [a, b]`
    return str(yaml.safe_dump({key: value}, default_flow_style=flow, width=float("inf"))).strip()


@options.command("schema")
def schema() -> None:
    """Print the JSON schema of config files, as in configs/schema.json."""
    click.echo(json.dumps(config_schema(), indent=2))


for command in (show, schema):
    config.add_command(command)


def config_schema() -> dict[str, Any]:
    """Make the JSON schema of a config file, with all settings and ``extends``. No setting is required."""
    made = Settings.model_json_schema()
    for model in dict.fromkeys(extension_settings().values()):
        made["properties"] |= model.model_json_schema()["properties"]
    made["title"] = "rankmill config file"
    made["properties"]["extends"] = {"type": "string", "title": "Config file that this one changes"}
    del made["required"]
    return made
