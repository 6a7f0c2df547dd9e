"""Makes text that others have written safe to show in a terminal."""

from __future__ import annotations

import re

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and characters that change the direction of text."""


def shown(text: str) -> str:
    r"""Escape each character that a terminal would act on.

    >>> shown("a\x1b[2J\u202eb")
    'a\\x1b[2J\\u202eb'
    """
    return _UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


def shown_json(text: str) -> str:
    """Escape the same characters in JSON, which keeps its meaning."""
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
