"""Reads a JSON text that a client has sent, strictly."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

_HUGE = re.compile(rb"[eE]\+?\d{3}|\d{210}")
"""Matches every JSON text with a number above 1.8e308. A number above 1.8e308 has an exponent of at least
three digits, or at least 210 digits before the point. Some smaller numbers have this form, too, so some
texts match without a number above 1.8e308.
"""


def read_json(raw: bytes) -> Any:
    """The value of a JSON text; raises `ValueError` if the text is not JSON, is nested too deeply, or has
    a number that no float can hold.
    """
    value = from_json(raw, allow_inf_nan=False)
    if _HUGE.search(raw):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("it has a number that is too large: none may be above 1.8e308") from None
    return value
