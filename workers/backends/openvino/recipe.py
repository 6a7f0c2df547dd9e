"""How a model is to be computed in 8 bits, where ``rankmill quantize`` has found that out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from workers.backends.model_file import model_file

RECIPE = "rankmill_quantization.json"
FACTORS = "rankmill_smoothing.safetensors"
"""Beside the model's own files, which stay as they are: in other precisions nothing reads these."""


class Recipe(BaseModel):
    """What workers read of `RECIPE`.

    Attributes
    ----------
    format
        Version of both files.
    left_out
        Linear layers that are not in 8 bits, by transformers' names.
    """

    format: Literal[1]
    left_out: tuple[str, ...]


def read_recipe(source: str | Path, revision: str | None) -> Recipe | None:
    """The recipe of a model in a directory or on the hub; ``None`` for most models.

    Raises
    ------
    ValueError
        This release cannot read it.
    OSError
        From transformers or the disk.
    """
    file = model_file(source, revision, RECIPE)
    if file is None:
        return None
    try:
        return Recipe.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{where}: {first['msg']}"
        raise ValueError(f"{RECIPE} cannot be read ({reason}); quantize the model again") from None
