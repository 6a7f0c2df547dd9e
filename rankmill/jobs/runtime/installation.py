"""How this rankmill was installed, so that messages can name the command that installs what is missing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rankmill.jobs.contract.errors import ConfigError

_CHECKOUT = Path(__file__).resolve().parents[3]


def install_line(extra: str) -> str:
    """Return the command that installs an extra of rankmill, from the place where rankmill came from."""
    if (_CHECKOUT / "pyproject.toml").is_file():  # this code runs from a checkout, whatever else is installed
        return install_command(extra, {"url": _CHECKOUT.as_uri(), "dir_info": {"editable": True}})
    recorded = metadata.distribution("rankmill").read_text("direct_url.json")
    return install_command(extra, json.loads(recorded) if recorded else None)


def require_packages(names: Iterable[str], extra: str, needing: str, instead: str = "") -> None:
    """Raise a `ConfigError` that names the missing packages, if one of `names` is not installed.

    Parameters
    ----------
    names
        The packages.
    extra
        The extra of rankmill that has the packages; the message has the command that installs it.
    needing
        What needs the packages, for the message.
    instead
        The end of the message: what the user can do instead of installing the packages.
    """
    missing = ", ".join(name for name in names if find_spec(name) is None)
    if missing:
        raise ConfigError(f"{needing} needs packages ({missing} missing): {install_line(extra)}{instead}")


def install_command(extra: str, origin: Mapping[str, Any] | None) -> str:
    """Return the command that installs an extra of a rankmill that came from `origin`.

    Parameters
    ----------
    extra
        A name in ``[project.optional-dependencies]``.
    origin
        The content of ``direct_url.json`` (PEP 610); ``None`` if rankmill came from a package index.

    >>> install_command("worker", None)
    "pip install 'rankmill[worker]'"
    >>> install_command("worker", {"url": "file:///src/rankmill", "dir_info": {"editable": True}})
    "pip install -e '/src/rankmill[worker]'"
    >>> install_command("s3", {"url": "https://host/rankmill-1.whl", "archive_info": {}})
    "pip install 'rankmill[s3] @ https://host/rankmill-1.whl'"
    """
    if origin is None:
        return f"pip install {shlex.quote(f'rankmill[{extra}]')}"
    url = str(origin["url"])
    if "dir_info" in origin:
        option = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {option}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if version := origin.get("vcs_info"):
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    return f"pip install {shlex.quote(f'rankmill[{extra}] @ {url}')}"
