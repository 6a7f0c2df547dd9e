"""Makes linear layers compute with weights and inputs in 8-bit floating point (e4m3), by torchao."""

from __future__ import annotations

from torch import nn
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
from torchao.quantization.quantize_.common import KernelPreference

_LEAST = 1e-12
"""The inputs of a layer for one token have one scale, which depends on the largest magnitude among them. If
that magnitude is below this value, the scale depends on this value instead, because a scale must not be 0.
"""


def round_linear_layers(network: nn.Module) -> None:
    """Make the linear layers of a network in bf16 compute in 8 bits, in place.

    Each row of weights and each token has its own scale, so no token depends on its neighbours. A model's
    last projections are not of type `nn.Linear`, so they are not rounded. Layers whose widths are not
    multiples of 16 are not rounded either, because the kernels do not take these.
    """
    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(),
        activation_value_lb=_LEAST,
        # otherwise other installed packages could change the kernels
        kernel_preference=KernelPreference.TORCH,
        set_inductor_config=False,  # with True, the whole process would multiply fp32 in TF32
    )
    quantize_(network, config, filter_fn=lambda module, _: type(module) is nn.Linear)
