"""The function from logits to score, chosen as `sentence_transformers.CrossEncoder` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.backends.base import Logits

Activation = Callable[[Logits], Logits]

_IDENTITY, _SIGMOID = "torch.nn.Identity", "torch.nn.Sigmoid"


def activation(asked: str, saved: str | None, model: str, outputs: int = 1) -> Activation:
    """The function to apply to logits of shape ``[rows]``, or of several outputs ``[rows, outputs]``.

    Parameters
    ----------
    asked
        The activation of the `ScoreSpec`.
    saved
        Dotted path of the function that the model was saved with; ``None`` means the sigmoid for one
        output, and none for several.
    model
        Name of the model.
    outputs
        How many outputs the model has.

    Raises
    ------
    SpecError
        The model's own function is not in `torch.nn`, or does not map logits to scores.
    """
    own = saved if saved is not None else _SIGMOID if outputs == 1 else _IDENTITY
    if asked == "probability":
        return _sigmoid if outputs == 1 else _softmax
    path = {"identity": _IDENTITY, "sigmoid": _SIGMOID}.get(asked, own)
    name = path.rpartition(".")[2] if path.startswith("torch.nn.") else ""
    function = _OWN.get(name) or _of_torch(name, outputs)
    if function is None:
        raise SpecError(
            f"model {model} names activation {path}, which torch.nn does not have; set --activation"
        )
    if asked != "softmax":
        return function
    if outputs == 1:
        why = f"activation softmax is for several outputs, and model {model} has one"
        raise SpecError(why, option="activation")
    return lambda logits: _softmax(function(logits))


def choose_output(label: str | None, labels: Sequence[str], model: str) -> int | None:
    """Which of a model's outputs is the score; ``None`` if there is only one.

    Parameters
    ----------
    label
        Name or number of an output, as asked for.
    labels
        Names of the outputs, in order.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The model has no such output, or has several and none was asked for.
    """
    names = ", ".join(f"{number}: {name}" for number, name in enumerate(labels[:_SHOWN]))
    names += ", and more" if len(labels) > _SHOWN else ""
    if label is None and len(labels) > 1:
        raise SpecError(
            f"model {model} has {len(labels)} outputs; name the one to score by with --label ({names}), "
            "or take all with --all-labels"
        )
    if label is None:
        return None
    numbers = [number for number, name in enumerate(labels) if name == label]
    numbers = numbers or [number for number, name in enumerate(labels) if name.lower() == label.lower()]
    if len(numbers) != 1 and label.isdecimal() and int(label) < len(labels):
        numbers = [int(label)]
    if len(numbers) != 1:
        raise SpecError(f"model {model} has no output {label!r}; it has {names}", option="label")
    return numbers[0] if len(labels) > 1 else None


_SHOWN = 20


def _sigmoid(logits: Logits) -> Logits:
    scores: Logits = np.exp(np.minimum(logits, 0)) / (1 + np.exp(-np.abs(logits)))  # never overflows
    return scores


def _softmax(logits: Logits) -> Logits:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Logits = powers / powers.sum(axis=-1, keepdims=True)
    return shares


_OWN: dict[str, Activation] = {"Identity": lambda logits: logits, "Sigmoid": _sigmoid}
"""Functions without PyTorch; most models use one of them."""


def _of_torch(name: str, outputs: int) -> Activation | None:
    """A class of `torch.nn` as a function; ``None`` if it is not an activation."""
    import torch  # takes a second, so only if it is needed

    kind = getattr(torch.nn, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        return None

    def apply(logits: Logits) -> Logits:
        whole = torch.from_numpy(logits.reshape(len(logits), -1))  # shape as in `CrossEncoder`
        scores: Logits = module(whole).numpy().reshape(logits.shape)
        return scores

    try:
        module = kind().eval()
        apply(np.zeros((3, outputs), np.float32))
    except Exception:  # the class needs arguments, or other input than logits
        return None
    return apply
