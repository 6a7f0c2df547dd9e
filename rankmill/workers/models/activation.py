"""Chooses the activation, which turns logits into scores, as `sentence_transformers.CrossEncoder` does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.backends.base import Logits

Activation = Callable[[Logits], Logits]

_IDENTITY, _SIGMOID = "torch.nn.Identity", "torch.nn.Sigmoid"


def activation(wanted: str, saved: str | None, model: str, outputs: int = 1) -> Activation:
    """Choose the function to apply to logits ``[rows]``, or ``[rows, outputs]`` for several outputs.

    Parameters
    ----------
    wanted
        The activation that the `ScoreSpec` asks for.
    saved
        Dotted path of the function that the model was saved with; ``None`` means the sigmoid for one output,
        and the identity for several.
    model
        Name of the model.
    outputs
        The number of the model's outputs.

    Raises
    ------
    SpecError
        The model's own function is not in `torch.nn` or does not map logits to scores, or softmax is asked
        for one output.
    """
    own = saved if saved is not None else _SIGMOID if outputs == 1 else _IDENTITY
    if wanted == "probability":
        return _sigmoid if outputs == 1 else _softmax
    path = {"identity": _IDENTITY, "sigmoid": _SIGMOID}.get(wanted, own)
    name = path.rpartition(".")[2] if path.startswith("torch.nn.") else ""
    function = _OWN.get(name) or _of_torch(name, outputs)
    if function is None:
        raise SpecError(
            f"model {model} names activation {path}, which torch.nn does not have; set --activation"
        )
    if wanted != "softmax":
        return function
    if outputs == 1:
        why = f"activation softmax is for several outputs, and model {model} has one"
        raise SpecError(why, option="activation")
    return lambda logits: _softmax(function(logits))


def _sigmoid(logits: Logits) -> Logits:
    scores: Logits = np.exp(np.minimum(logits, 0)) / (1 + np.exp(-np.abs(logits)))  # never overflows
    return scores


def _softmax(logits: Logits) -> Logits:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Logits = powers / powers.sum(axis=-1, keepdims=True)
    return shares


_OWN: dict[str, Activation] = {"Identity": lambda logits: logits, "Sigmoid": _sigmoid}
"""Activation functions that do not need PyTorch, by their names in `torch.nn`; most models use one of these.
"""


def _of_torch(name: str, outputs: int) -> Activation | None:
    """Make an activation function of the class `name` in `torch.nn`. Returns ``None`` if `torch.nn` has no
    such module class, or if the class cannot be applied to logits of `outputs` outputs.
    """
    import torch

    kind = getattr(torch.nn, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        return None

    def apply(logits: Logits) -> Logits:
        whole = torch.from_numpy(logits.reshape(len(logits), -1))  # `CrossEncoder` passes this shape
        scores: Logits = module(whole).numpy().reshape(logits.shape)
        return scores

    try:
        module = kind().eval()
        apply(np.zeros((3, outputs), np.float32))
    except Exception:  # for example, the class cannot be made without arguments
        return None
    return apply
