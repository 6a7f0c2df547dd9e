"""Reads what ``rankmill quantize`` adds to a model: smoothing factors, and names of layers that stay out of 8
bits.

Some channels of a hidden state are many times as large as others. In 8 bits a group of channels shares a
scale, so the small channels lose precision. Smoothing divides the channels by factors and multiplies the
columns of the weights by the same factors, which changes nothing in exact arithmetic. The inputs gain more
precision than the weights lose, because each row of the weights has its own scale (Xiao et al., SmoothQuant,
2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from rankmill.jobs.contract.spec import RECIPE, RECIPE_FORMAT, complaint
from rankmill.workers.host.model_file import model_file

FACTORS = "rankmill_smoothing.safetensors"
"""Name of the file with the smoothing factors, which lies beside `RECIPE` in a model's folder. Only the kinds
of int8 use the factors.
"""


class Smoothed(nn.Module):
    """A linear layer that divides its inputs by smoothing factors ``[into]`` and has weights that are
    multiplied by the same factors. In exact arithmetic it computes the same as the layer without factors.
    """

    inverse: Tensor

    def __init__(self, linear: nn.Linear, factors: Tensor) -> None:
        super().__init__()
        if factors.shape != (linear.in_features,):
            raise ValueError(f"{FACTORS} is of another model: {list(factors.shape)} factors for {linear}")
        self.linear = linear
        self.register_buffer("inverse", 1 / factors)
        with torch.no_grad():
            linear.weight *= factors

    @property
    def weight(self) -> Tensor:
        """The weights ``[out, into]`` that the layer would have without the smoothing factors."""
        return self.linear.weight * self.inverse

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        smooth: Tensor = self.linear(hidden * self.inverse)
        return smooth


class LeftOut(nn.Module):
    """A linear layer whose weights do not become 8-bit numbers. `rankmill.workers.backends.openvino.weights`
    recognizes it by the name of the attribute ``exact_linear``.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.exact_linear = linear

    @property
    def weight(self) -> Tensor:
        return self.exact_linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.exact_linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        exact: Tensor = self.exact_linear(hidden)
        return exact


class _Recipe(BaseModel):
    """The content of the file `RECIPE`: its version, and the names of the layers that stay out of 8 bits."""

    format: int = Field(ge=RECIPE_FORMAT, le=RECIPE_FORMAT)
    left_out: tuple[str, ...]


def apply_recipe(classifier: Any, source: str | Path, revision: str | None) -> None:
    """Apply a model's file `RECIPE` to its classifier: add the smoothing factors, and mark the layers that
    stay out of 8 bits.

    If the model has no such file, as is usual, the classifier is not changed.

    Raises
    ------
    ValueError
        The recipe belongs to another model, its factors are missing, or this release cannot read it.
    OSError
        A file cannot be read.
    """
    file, factors = (model_file(source, revision, name) for name in (RECIPE, FACTORS))
    if file is None:
        return
    try:
        recipe = _Recipe.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        why = complaint(error, ())
        raise ValueError(f"{RECIPE} cannot be read ({why}): quantize the model again") from None
    if factors is None:
        raise ValueError(f"it has a {RECIPE}, but no {FACTORS}: quantize the model again")
    smooth(classifier, load_file(factors), recipe.left_out)


def smooth(classifier: Any, factors: Mapping[str, Tensor], left_out: tuple[str, ...]) -> None:
    """Wrap the linear layers of a classifier whose names are in `left_out` or `factors`.

    A layer in `left_out` is wrapped with `LeftOut`. A layer in `factors` but not in `left_out` is wrapped
    with `Smoothed`.

    Raises
    ------
    ValueError
        A name in `left_out` or `factors` does not belong to a linear layer of the classifier.
    """
    linears = {name for name, module in classifier.named_modules() if isinstance(module, nn.Linear)}
    foreign = sorted({*factors, *left_out} - linears)
    if foreign:
        raise ValueError(f"{RECIPE} belongs to another model: {foreign[0]} is not a linear layer here")
    for name in left_out:
        classifier.set_submodule(name, LeftOut(classifier.get_submodule(name)))
    for name in sorted(factors.keys() - set(left_out)):
        classifier.set_submodule(name, Smoothed(classifier.get_submodule(name), factors[name]))
