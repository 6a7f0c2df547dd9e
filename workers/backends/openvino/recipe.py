"""The files that ``rankmill quantize`` adds to a model, and how they are read."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from rankmill.jobs.contract.spec import RECIPE, RECIPE_FORMAT
from rankmill.workers.host.model_file import model_file

FACTORS = "rankmill_smoothing.safetensors"
"""File beside `RECIPE` with the smoothing factors. Only int8 reads the two."""


class Recipe(BaseModel):
    """The part of `RECIPE` that workers read.

    Attributes
    ----------
    format
        Version of both files.
    left_out
        Names, in transformers, of the linear layers that stay out of 8 bits.
    """

    format: int = Field(ge=RECIPE_FORMAT, le=RECIPE_FORMAT)
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
