"""Checks that the weights of a checkpoint are those of the model that its config describes."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.host.model_file import model_file

_BUFFERS = ("position_ids", "token_type_ids")
"""Buffers, not weights, that old releases of transformers saved."""


def check_size(kind: Any, source: str | Path, revision: str | None, config: Any) -> None:
    """Refuse a config that describes far more parameters than the checkpoint has, before allocating memory.

    Raises
    ------
    SpecError
        The config describes more than twice the parameters of the checkpoint.
    """
    there = sum(map(_parameters, _checkpoint(source, revision)))
    if not there or getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        wanted = kind.from_config(config, trust_remote_code=False)
    described = sum(parameter.numel() for parameter in wanted.parameters())
    if described > 2 * there:
        raise SpecError(
            f"model {source} has {there:,} parameters, but its config.json describes {described:,}"
        )


def check_names(source: str | Path, model: Any, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights of the model, or has weights of another architecture.

    Parameters
    ----------
    source
        As in `load_config`.
    model
        From transformers, which fills missing weights with random numbers.
    report
        What transformers reports about the weights (``output_loading_info``).

    Raises
    ------
    SpecError
        The message names such a weight.
    """
    headless = model.base_model is model  # what reads its tokens does not read its pooler
    missing = [name for name in report["missing_keys"] if not (headless and name.startswith("pooler."))]
    if missing:
        raise SpecError(
            f"model {source} has no {_listed(missing)}: it is no cross-encoder, "
            f"or no {model.config.model_type} as its config.json says"
        )
    if report["mismatched_keys"]:
        name, there, wanted = min(report["mismatched_keys"])
        raise SpecError(
            f"model {source} has a weight {name} of shape {list(there)}, "
            f"where its config.json wants {list(wanted)}"
        )
    foreign = [name for name in report["unexpected_keys"] if _is_foreign(name, model)]
    if foreign:
        raise SpecError(
            f"model {source} has {_listed(foreign)}, which a {model.config.model_type} as in its config.json "
            "does not have: it is of another architecture, and its scores would be wrong"
        )


def _is_foreign(name: str, model: Any) -> bool:
    """Whether an unexpected weight belongs to the model's body or its head.

    A checkpoint may also hold heads for other tasks, and a pooler that this head does not read.
    """
    modules = {path for path, _ in model.named_modules()}
    parent, body = name, model.base_model_prefix
    while parent not in modules:
        parent = parent.rpartition(".")[0]
    unused = name.startswith(f"{body}.pooler.") and parent == body
    return parent != "" and not unused and name.rpartition(".")[2] not in _BUFFERS


def _checkpoint(source: str | Path, revision: str | None) -> Iterable[Path]:
    """The files with weights; not found for a model on the hub whose weights are in several files."""
    if isinstance(source, Path):
        return source.glob("*.safetensors")
    file = model_file(source, revision, "model.safetensors")
    return [] if file is None else [file]


def _parameters(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more weights" if others else f"weight {first}"


def own_memory(module: Any) -> Any:
    """The module, with copies of its weights: until then they are the file, which somebody may write over."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module
