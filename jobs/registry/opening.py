"""Opening the registry of the settings, and finding what a command names in it."""

from __future__ import annotations

import getpass
import socket

from rankmill.jobs.contract.errors import ConfigError, InputError
from rankmill.jobs.registry.names import Reference, parse_reference
from rankmill.jobs.registry.registry import Registry
from rankmill.jobs.runtime.settings import Settings


def open_registry(settings: Settings) -> Registry:
    """The registry; raises `ConfigError` if the settings name none."""
    if not settings.registry:
        raise ConfigError(
            "no registry is named: give --registry or set RANKMILL_REGISTRY to its folder or URL"
        )
    return Registry(settings.registry)


def reference(text: str, what: str = "VERSION") -> Reference:
    """The reference that a command line names.

    Raises
    ------
    InputError
        It is none.
    """
    found = parse_reference(text)
    if found is None:
        raise InputError(f"{text} is not of the form NAME@{what}")
    return found


def one_version(registry: Registry, found: Reference) -> Reference:
    """The version that a version's name or an alias stands for.

    Raises
    ------
    InputError
        There is no such, or it is an alias that stands for several.
    """
    choice = registry.resolve(found)
    if choice.only is None:
        shown = ", ".join([*choice.versions, *([choice.shadow] if choice.shadow else [])])
        raise InputError(f"{found} stands for several versions ({shown}); name one of them")
    return Reference(found.name, next(iter(choice.versions)))


def who() -> str:
    """The person at this command, and their host, as manifests and aliases say it."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = "?"
    return f"{user}@{socket.gethostname()}"
