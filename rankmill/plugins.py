"""Finds plugins, which extend rankmill. Installed packages, and rankmill itself, name them in entry points.

A package names what it adds in its metadata, as here in a ``pyproject.toml``::

    [project.entry-points."rankmill.formats"]
    pairs = "my_package:PAIRS"

Nothing is imported before it is needed. An extra that the object needs follows in brackets:
``my_package:PAIRS [extra]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, distribution, entry_points
from typing import Any, Literal

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.installation import install_line

Seam = Literal[
    "rankmill.backends",
    "rankmill.commands",
    "rankmill.dialects",
    "rankmill.files",
    "rankmill.formats",
    "rankmill.models",
    "rankmill.names",
    "rankmill.orders",
    "rankmill.routes",
    "rankmill.settings",
    "rankmill.watch",
]
"""The groups of entry points, and what an entry point of each group names.

- ``backends``: a `rankmill.workers.backends.base.BackendKind`.
- ``commands``: a dictionary of commands, each as a `rankmill.cli.main.Listed`.
- ``dialects``: a tuple of a dialect's request bodies; the entry point has the dialect's name.
- ``files``: a function that opens `rankmill.producer.client.files.FileRuns`. The entry point's name is a
  `RunStore.server_kind`.
- ``formats``: a `rankmill.producer.files.formats.base.Format`.
- ``models``: a class of `rankmill.jobs.model_names.NamedModels`.
- ``names``: an object for users. The entry point ``score_file`` makes it ``rankmill.score_file``.
- ``orders``: a `rankmill.extensions.runners.orders.OrderKind`; the entry point has the name of this kind of
  orders.
- ``routes``: a subclass of `rankmill.extensions.gateway.gateway.Addition`.
- ``settings``: a subclass of `rankmill.jobs.runtime.settings.ExtensionSettings`.
- ``watch``: a `rankmill.cluster.watch.Watch`.
"""


@cache
def _named(seam: Seam) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name, rankmill's own first.

    A name that several packages add has several entry points.
    """
    named: dict[str, list[EntryPoint]] = {}
    _ours()
    for point in sorted(
        entry_points(group=seam), key=lambda point: (_package(point) != "rankmill", point.name)
    ):
        same_name = named.setdefault(point.name, [])
        if point.value not in [other.value for other in same_name]:
            same_name.append(point)
    return named


def _only(points: list[EntryPoint]) -> EntryPoint:
    point, *others = points
    if others:
        raise ConfigError(
            f"two packages add {point.name!r} to {point.group}: {_package(point)} and {_package(others[0])}; "
            "uninstall one of them"
        )
    return point


def names(seam: Seam) -> list[str]:
    """Return the names of all plugins that installed packages add to a group (`Seam`), rankmill's own first.

    Raises
    ------
    ConfigError
        Several packages add the same name, or the running copy of rankmill is not the installed one.
    """
    return [_only(points).name for points in _named(seam).values()]


def load(seam: Seam, name: str) -> Any:
    """Import the plugin that an installed package adds to a group (`Seam`) under this name.

    Raises
    ------
    KeyError
        No installed package adds that name.
    ConfigError
        The plugin cannot be imported, several packages add the name, or the running copy of rankmill is not
        the installed one; the message says what to do.
    """
    ours = [point for point in _ours() if (point.group, point.name) == (seam, name)]
    return _load(ours or _named(seam)[name])


def load_all(seam: Seam) -> list[Any]:
    """Import all plugins of a group (`Seam`), rankmill's own first. Raises what `names` and `load` raise."""
    return [load(seam, name) for name in names(seam)]


def load_each(seam: Seam) -> Iterator[tuple[str, str, Any]]:
    """Import the plugins of a group (`Seam`), rankmill's own first. Yields name, package and plugin of each.

    If a plugin cannot be imported, or several packages add its name, a `ConfigError` that says so is yielded
    instead of the plugin. Raises `ConfigError` if the running copy of rankmill is not the installed one.
    """
    for name, points in _named(seam).items():
        try:
            plugin = _load(points)
        except ConfigError as error:
            plugin = error
        yield name, _package(points[0]), plugin


def _load(points: list[EntryPoint]) -> Any:
    point = _only(points)
    try:
        return point.load()
    except Exception as error:  # the code of other packages may raise anything, even a KeyError
        extra = next(iter(point.extras), None)
        way_out = f"{install_line(extra)} installs it" if extra else f"repair or uninstall {_package(point)}"
        raise ConfigError(
            f"{point.name!r} of {point.group} cannot be imported ({error}); {way_out}"
        ) from error


@cache
def _ours() -> EntryPoints:
    """Return rankmill's own entry points. Reading only these is much faster than reading those of all
    packages.

    Raises
    ------
    ConfigError
        Rankmill is not installed, or the running copy is not the installed one.
    """
    try:
        points = distribution("rankmill").entry_points
    except PackageNotFoundError:
        points = EntryPoints()
    if not points.select(group="rankmill.backends"):
        raise ConfigError(
            "this code of rankmill is not the one that is installed, so its parts are not found: "
            f"{install_line('worker')} installs it"
        )
    return points


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown package"
