"""How a command ends that cannot go on: one line on standard error, and an exit code that means something."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from jobs.errors import ConfigError
from jobs.runtime.connection import mask_passwords
from jobs.runtime.settings import Settings

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def fail(program: str, reason: object, code: int) -> NoReturn:
    """End with `reason`, an error or a message, and its notes if it has any."""
    parts = [str(reason), *getattr(reason, "__notes__", [])]
    click.echo(f"{program}: {mask_passwords(' '.join('; '.join(parts).split()))}", err=True)
    sys.exit(code)


def server_of(settings: Settings) -> str:
    """The server's URL; raises `ConfigError` where a command needs one and none is named."""
    if not settings.redis_url:
        raise ConfigError("no Redis server is named: give --redis or set REDIS_URL")
    return settings.redis_url
