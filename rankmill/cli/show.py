"""Printing: names, reasons and devices are others' words, and a terminal acts on none of them."""

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
    """A console whose texts bring no sequences of their own; its styles are its only ones."""

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **options):
            yield Segment(text if control else shown(text), style, control)


def console() -> Console:
    """A console on standard output that reads no text as markup.

    Where no terminal says how wide it is, nor ``COLUMNS``, no line is too long: a program reads whole names.
    """
    found = _Plain(markup=False, highlight=False, emoji=False)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _WIDE
    return found


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a text, to standard error with `err`."""
    click.echo(shown(text), err=err)


def json_of(found: BaseModel, indent: int | None = None) -> str:
    """What ``--json`` prints of a model."""
    return shown_json(found.model_dump_json(indent=indent))
