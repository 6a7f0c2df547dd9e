"""Prints names and messages that may come from others. Control characters in them are escaped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import click
from pydantic import BaseModel
from rich.console import Console
from rich.segment import Segment

from rankmill.jobs.contract.shown import shown, shown_json

_WIDE = 100_000


class _Plain(Console):
    """A console that escapes control characters in texts; only its own styles write control sequences."""

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **options):
            yield Segment(text if control else shown(text), style, control)


def console() -> Console:
    """Make a console on standard output that does not read text as markup.

    If neither a terminal nor ``COLUMNS`` sets a width, lines are not broken, so that programs read whole
    names.
    """
    plain = _Plain(markup=False, highlight=False, emoji=False)
    if not plain.is_terminal and "COLUMNS" not in os.environ:
        plain.width = _WIDE
    return plain


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a text, to standard error if `err`."""
    click.echo(shown(text), err=err)


def json_of(model: BaseModel, indent: int | None = None) -> str:
    """Return the JSON that a command prints with ``--json`` for a pydantic object."""
    return shown_json(model.model_dump_json(indent=indent))
