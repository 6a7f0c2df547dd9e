"""Keeps pyarrow from importing pandas."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any


def leave_out_pandas() -> None:
    """Make pyarrow believe that pandas is not installed. Other code can still import pandas.

    Without this function, pyarrow imports pandas when it makes its first array. That import takes a third of
    a second, and workers and score-file seldom need it.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return

    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("not looked for", name=name)

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
