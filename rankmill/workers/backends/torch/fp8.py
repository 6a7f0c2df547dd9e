"""Linear layers with weights and inputs in 8-bit floating point (e4m3), by torchao."""

from __future__ import annotations

from torch import nn
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
from torchao.quantization.quantize_.common import KernelPreference

_LEAST = 1e-12
"""A token whose states are all 0 has a scale, too."""


def round_linear_layers(network: nn.Module) -> None:
    """Round the linear layers of a network in bf16, where it is.

    Each row of weights has a scale, and each token: so no token depends on its neighbours. Last projections
    are not of type `nn.Linear` here and stay as they are, as do layers whose widths are no multiples of 16,
    which the kernels do not take.
    """
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(),
        activation_value_lb=_LEAST,
        kernel_preference=KernelPreference.TORCH,  # whatever else is installed
        set_inductor_config=False,  # it lets the whole process multiply fp32 in TF32
    )
    quantize_(network, config, filter_fn=lambda module, _: type(module) is nn.Linear)
