"""Keeps pyarrow from importing pandas, which workers and score-file seldom need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not looked for", name=fullname)
        return None


def leave_out_pandas() -> None:
    """Make pyarrow believe that pandas is not installed. Other code can still import pandas.

    Without this function, pyarrow imports pandas when it makes its first array. That import takes a third of
    a second.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
