"""Reads JSON texts from clients, and refuses numbers that are too large for a float."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

_HUGE = re.compile(rb"[eE]\+?\d{3}|\d{210}")
"""Matches an exponent of three digits or a row of 210 digits. Without them, no number is above 1.8e308."""


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
