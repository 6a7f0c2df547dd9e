"""Text that others have written, as a terminal may have it."""

from __future__ import annotations

import re

_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and those that turn the direction of text."""


def shown(text: str) -> str:
    r"""The text with an escape in the place of each character that a terminal acts on.

    >>> shown("a\x1b[2J\u202eb")
    'a\\x1b[2J\\u202eb'
    """
    return _UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


def shown_json(text: str) -> str:
    """The same of a JSON text, which says the same afterwards."""
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
