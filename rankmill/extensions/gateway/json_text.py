"""Reads JSON texts from clients, and refuses numbers that are too large for a float."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json


def read_json(raw: bytes) -> Any:
    """The value of a JSON text; raises `ValueError` if the text is not JSON, is nested too deeply, or has
    a number with a fraction or an exponent that no float can hold.
    """
    value = from_json(raw, allow_inf_nan=False)
    try:
        json.dumps(value, allow_nan=False)  # `value` has an infinite float for such a number
    except ValueError:
        raise ValueError("it has a number that is too large: none may be above 1.8e308") from None
    return value
