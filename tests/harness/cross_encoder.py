"""sentence-transformers' `CrossEncoder`, whose scores rankmill's must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def cross_encoder(model: Path | str, **options: Any) -> Any:
    """The model on the CPU. Imported here: the import takes seconds, and few tests need it."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(model), device="cpu", **options)
