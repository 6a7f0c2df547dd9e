"""Smoothing: large values are moved from a layer's input into its weights, which are easier to quantize.

Some channels of a hidden state are many times as large as others. In 8 bits a group of channels shares a
scale, so the small channels lose bits. Smoothing divides the channels by factors and multiplies the columns
of the weights by the same factors, which changes nothing in exact arithmetic. The weights lose less, as each
of their rows has a scale of its own (Xiao et al., SmoothQuant, 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from rankmill.jobs.contract.spec import RECIPE
from rankmill.workers.backends.openvino.recipe import FACTORS, Recipe
from rankmill.workers.host.model_file import model_file

KEPT_EXACT = "exact_linear"
"""Name of the module around a layer that stays out of 8 bits; the names of its graph nodes contain it."""


class Smoothed(nn.Module):
    """A linear layer with smoothing factors ``[into]``; it computes the same as the layer without them."""

    inverse: torch.Tensor

    def __init__(self, linear: nn.Linear, factors: torch.Tensor) -> None:
        super().__init__()
        if factors.shape != (linear.in_features,):
            raise ValueError(f"{FACTORS} is of another model: {list(factors.shape)} factors for {linear}")
        self.linear = linear
        self.register_buffer("inverse", 1 / factors)
        with torch.no_grad():
            linear.weight *= factors

    @property
    def weight(self) -> torch.Tensor:
        """Weights that compute the same without factors, ``[out, into]``."""
        return self.linear.weight * self.inverse

    @property
    def bias(self) -> torch.Tensor | None:
        """Of the layer, ``[out]``."""
        return self.linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., into]`` to ``[..., out]``."""
        smooth: torch.Tensor = self.linear(hidden * self.inverse)
        return smooth


class LeftOut(nn.Module):
    """A linear layer in a module named `KEPT_EXACT`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.add_module(KEPT_EXACT, linear)

    @property
    def weight(self) -> torch.Tensor:
        """Of the layer, ``[out, into]``."""
        weight = self.get_submodule(KEPT_EXACT).weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Of the layer, ``[out]``."""
        bias = self.get_submodule(KEPT_EXACT).bias
        assert bias is None or isinstance(bias, torch.Tensor)
        return bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., into]`` to ``[..., out]``."""
        exact: torch.Tensor = self.get_submodule(KEPT_EXACT)(hidden)
        return exact


def apply_recipe(classifier: Any, recipe: Recipe, source: str | Path, revision: str | None) -> None:
    """Give a classifier from `load_classifier` the factors of its recipe, and mark the layers to leave out.

    Raises
    ------
    ValueError
        The recipe is that of another model.
    OSError
        The factors cannot be read.
    """
    file = model_file(source, revision, FACTORS)
    if file is None:
        raise ValueError(f"it has a {RECIPE}, but no {FACTORS}: quantize the model again")
    smooth(classifier, load_file(file), recipe.left_out)


def smooth(classifier: Any, factors: Mapping[str, torch.Tensor], left_out: tuple[str, ...]) -> None:
    """Replace the linear layers that `factors` and `left_out` name.

    Raises
    ------
    ValueError
        The classifier has no such layers.
    """
    linears = {name for name, module in classifier.named_modules() if isinstance(module, nn.Linear)}
    foreign = sorted({*factors, *left_out} - linears)
    if foreign:
        raise ValueError(f"{RECIPE} is of another model: {foreign[0]} is no linear layer here")
    for name in left_out:
        classifier.set_submodule(name, LeftOut(classifier.get_submodule(name)))
    for name in sorted(factors.keys() - set(left_out)):
        classifier.set_submodule(name, Smoothed(classifier.get_submodule(name), factors[name]))
