"""Lists all paths that take texts to score or to tokenize, and finds the dialect of a path."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from rankmill import plugins
from rankmill.extensions.gateway.dialects.base import Body, Dialect, ScorePath
from rankmill.extensions.gateway.dialects.shared import INVOKED, SHARED, SHARED_PATHS
from rankmill.extensions.gateway.dialects.tei import TEI
from rankmill.jobs.contract.errors import ConfigError


@cache
def bodies() -> tuple[type[Body], ...]:
    """Return the classes of request bodies of all installed dialects.

    Raises
    ------
    ConfigError
        A dialect cannot be imported.
    """
    return tuple(body for of_dialect in plugins.load_all("rankmill.dialects") for body in of_dialect)


def dialects() -> dict[str, Dialect]:
    """Return the installed dialects by name. Raises `ConfigError` if one of them is not valid."""
    return {body.dialect.name: body.dialect for body in bodies()}


def score_paths(owner: str | None = None) -> tuple[ScorePath, ...]:
    """Return all paths of the gateway that take texts to score or to tokenize.

    Each dialect has its paths below its name, such as ``/cohere/v2/rerank``. Several dialects may have the
    same path without the name, such as ``/v2/rerank``. Then these are asked in order, and the first that has
    the path decides:

    - the dialect `owner`,
    - the table `SHARED_PATHS`,
    - the installed dialects, in the order of `bodies()`.

    Parameters
    ----------
    owner
        Name of the dialect whose paths come first (the setting ``gateway_dialect``).

    Raises
    ------
    ConfigError
        The dialect `owner` is not installed.
    """
    if owner is not None and owner not in dialects():
        raise ConfigError(
            f"gateway_dialect: no dialect {owner!r:.100} is installed; installed are {', '.join(dialects())}"
        )
    paths = dict(SHARED_PATHS)
    for body in bodies():
        dialect = body.dialect
        for path in body.paths:
            alone = ScorePath(path, body.summary, (body,), dialect)
            if dialect.name == owner or path not in paths:
                paths[path] = alone
            paths[f"/{dialect.name}{path}"] = replace(alone, path=f"/{dialect.name}{path}")
    for dialect in INVOKED:
        path = f"/{dialect.name}/invocations"
        paths[path] = replace(paths["/invocations"], path=path, dialect=dialect, options=())
        if dialect.name == owner:
            paths["/invocations"] = replace(paths[path], path="/invocations")
    return tuple(paths.values())


def certain(path: str, owner: str | None) -> str:
    """Make a path that means the same even if the setting ``gateway_dialect`` changes.

    If `owner` is ``cohere``, ``/v2/rerank`` becomes ``/cohere/v2/rerank``.

    Parameters
    ----------
    path
        A path of the gateway. A path that the dialect `owner` does not have is returned as it is.
    owner
        Name of the dialect that the setting names now.
    """
    owned = f"/{owner}{path}"
    return owned if any(each.path == owned for each in score_paths()) else path


@cache
def _by_path() -> dict[str, Dialect]:
    return {"/info": TEI} | {path.path: path.dialect for path in score_paths()}


def dialect_at(path: str) -> Dialect:
    """Return the dialect in which errors at a path are answered.

    - A path in `score_paths()` has the dialect that is given there.
    - Another path that begins with a dialect's name, such as ``/cohere/x``, has this dialect.
    - All other paths have the dialect `SHARED`.
    """
    return _by_path().get(path) or dialects().get(path.lstrip("/").partition("/")[0]) or SHARED
