"""Defines the poolings, dense layers and norms that sentence-transformers runs after a transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.batches.layout import SavedModule
from rankmill.workers.host.model_file import model_file

_OLDER = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older settings of sentence-transformers' module Pooling, and the kind of pooling that each switches on."""

States = dict[str, Tensor]
"""The tensors that sentence-transformers' modules pass on to each other, by name."""


class Chain(nn.Module):
    """The modules of sentence-transformers after a transformer. They compute logits ``[rows, outputs]`` from
    hidden states ``[rows, tokens, width]`` and their mask.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)

    @property
    def reads_first_token(self) -> bool:
        return all(step.modes == ("cls",) for step in self.steps if isinstance(step, Pooling)) and isinstance(
            self.steps[0], Pooling
        )

    def heads(self) -> list[str]:
        """Names of the linear layers that make the scores; usually there is one."""
        return [
            f"steps.{number}.linear"
            for number, step in enumerate(self.steps)
            if isinstance(step, Dense) and step.into == "scores"
        ]

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        states = {"token_embeddings": hidden, "mask": mask}
        for step in self.steps:
            step(states)
        return states["scores"]


class Pooling(nn.Module):
    """Pools the hidden states of each row's tokens, for example to their mean.

    If there are several kinds of pooling, their vectors are joined. The result is ``[rows, kinds * width]``.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, states: States) -> None:
        hidden, mask = states["token_embeddings"], states["mask"]
        pooled = [_POOLINGS[mode](hidden, mask) for mode in self.modes]
        states["sentence_embedding"] = torch.cat(pooled, dim=-1)


def _mean(hidden: Tensor, mask: Tensor, power: float = 1.0) -> Tensor:
    total = (hidden * mask[:, :, None]).sum(dim=1, dtype=torch.float32)
    return (total / mask.sum(dim=1, keepdim=True).float() ** power).to(hidden.dtype)


def _weighted(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))[:, :, None].float()
    return ((hidden * weights).sum(dim=1) / weights.sum(dim=1)).to(hidden.dtype)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    places = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return hidden[torch.arange(len(hidden)), places]


_POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda hidden, mask: hidden[:, 0],
    "max": lambda hidden, mask: hidden.masked_fill(mask[:, :, None] == 0, -torch.inf).max(dim=1).values,
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, mask: _mean(hidden, mask, 0.5),
    "weightedmean": _weighted,
    "lasttoken": _last,
}


class Dense(nn.Module):
    """A linear layer with an activation function. With ``use_residual`` its input is added to the result,
    through another linear layer if the widths differ.
    """

    def __init__(self, config: dict[str, Any], activation: nn.Module) -> None:
        super().__init__()
        width, out = int(config["in_features"]), int(config["out_features"])
        self.linear = nn.Linear(width, out, bias=bool(config.get("bias", True)))
        self.activation = activation
        self.around = bool(config.get("use_residual", False))
        if self.around and width != out:
            self.residual = nn.Linear(width, out, bias=False)
        self.read = str(config.get("module_input_name") or "sentence_embedding")
        self.into = str(config.get("module_output_name") or self.read)

    def forward(self, states: States) -> None:
        inputs = states[self.read]
        out = self.activation(self.linear(inputs))
        if self.around:
            out = out + (self.residual(inputs) if hasattr(self, "residual") else inputs)
        states[self.into] = out


class LayerNorm(nn.Module):
    """A module that normalizes the pooled vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, states: States) -> None:
        states["sentence_embedding"] = self.norm(states["sentence_embedding"])


class Normalize(nn.Module):
    """A module that scales vectors to length 1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.read = str(config.get("module_input_name") or "sentence_embedding")
        self.into = str(config.get("module_output_name") or self.read)

    def forward(self, states: States) -> None:
        states[self.into] = nn.functional.normalize(states[self.read], p=2, dim=-1)


def load_chain(source: str | Path, revision: str | None, steps: Sequence[SavedModule], width: int) -> Chain:
    """Load the modules that sentence-transformers runs after a transformer, with their weights.

    Raises
    ------
    SpecError
        A module has weights or settings that rankmill does not know, the modules do not fit each other, or
        none makes a score.
    """
    modules = []
    for step in steps:
        with torch.device("meta"):  # allocate no memory before the sizes of the weights are compared
            module = _module(source, step)
        if any(True for _ in module.parameters()):
            _fill(module, source, revision, step)
        modules.append(module)
    chain = Chain(modules)
    if not chain.heads():
        raise SpecError(
            f"model {source} has no Dense module with module_output_name scores: it makes no score"
        )
    try:
        with torch.inference_mode():
            chain.eval()(torch.zeros(1, 2, width), torch.ones(1, 2, dtype=torch.long))
    except (KeyError, RuntimeError) as error:
        raise SpecError(f"the modules of model {source} do not fit each other: {_short(error)}") from error
    return chain


def _module(source: str | Path, step: SavedModule) -> nn.Module:
    config = step.config
    match step.kind:
        case "Pooling":
            return Pooling(_modes(source, config))
        case "Dense":
            return Dense(config, _function(source, config))
        case "LayerNorm":
            return LayerNorm(int(config["dimension"]))
        case _:
            return Normalize(config)


def modes_of(config: dict[str, Any]) -> list[str]:
    """Return the kinds of pooling that the config of a module Pooling asks for, by name."""
    older = [new for old, new in _OLDER.items() if config.get(old)]
    modes = config.get("pooling_mode") or older or ["mean"]
    return [modes] if isinstance(modes, str) else [*modes]


def _modes(source: str | Path, config: dict[str, Any]) -> Sequence[str]:
    modes = modes_of(config)
    if not set(modes) <= _POOLINGS.keys():
        raise SpecError(f"model {source} has a pooling {modes}; rankmill knows {', '.join(_POOLINGS)}")
    if not config.get("include_prompt", True):
        raise SpecError(f"model {source} leaves the prompt out of its pooling, which rankmill does not do")
    return modes


def _function(source: str | Path, config: dict[str, Any]) -> nn.Module:
    """Return the activation function that a `Dense` module's config names. As in sentence-transformers, only
    functions of ``torch.nn`` are allowed.
    """
    path = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = getattr(nn, str(path).rpartition(".")[2], None) if str(path).startswith("torch.nn.") else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise SpecError(
            f"model {source} names activation {path} for a Dense module, which torch.nn does not have"
        )
    return kind()


def _fill(module: nn.Module, source: str | Path, revision: str | None, step: SavedModule) -> None:
    """Load the weights of a module from its file, which must have all of them and nothing else."""
    name = f"{step.path}/model.safetensors"
    file = model_file(source, revision, name)
    if file is None:
        raise SpecError(f"model {source} has no {name}: save the model with safe_serialization=True")
    try:
        weights = {key: value.float() for key, value in load_file(file).items()}
        module.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise SpecError(f"model {source}: {name} does not fit its config.json: {_short(error)}") from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
