"""Prepares text for people: escapes characters that a terminal would act on, sorts names as people expect,
and writes counts.
"""

from __future__ import annotations

import re

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and newline, characters that change the direction of writing, and lone
surrogates.
"""


def shown(text: str) -> str:
    r"""Escape each character that a terminal would act on. Also escape lone surrogates, which UTF-8 does not
    have.

    >>> shown("a\x1b[2J\u202eb")
    'a\\x1b[2J\\u202eb'
    """
    return _UNSHOWN.sub(lambda match: ascii(match[0])[1:-1], text)


def shown_json(text: str) -> str:
    """Escape each character of a JSON text that a terminal would act on; the values stay the same."""
    return _UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def counted(number: int, noun: str) -> str:
    """Write a number and the noun that it counts, in the plural unless the number is 1.

    >>> counted(1, "run"), counted(2000, "run")
    ('1 run', '2,000 runs')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def unscored(rows: int) -> str:
    """Write that so many rows have no score.

    >>> unscored(1), unscored(2000)
    ('1 row has no score', '2,000 rows have no score')
    """
    return f"{counted(rows, 'row')} {'has' if rows == 1 else 'have'} no score"


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names as people do, with ``v2`` before ``v10``.

    >>> sorted(["v10", "v2", "v1b", "v1"], key=natural_order)
    ['v1', 'v1b', 'v2', 'v10']
    """
    parts = enumerate(re.split(r"(\d+)", name))  # every second part is a number
    return [
        (1, len(number := part.lstrip("0")), number) if place % 2 else (0, 0, part)
        for place, part in parts
        if part
    ]
