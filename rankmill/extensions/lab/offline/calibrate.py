"""Observes the inputs of a model's linear layers, and writes a copy of the model with smoothing factors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.model_files import model_files
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.backends.families import BERT_LIKE
from rankmill.workers.backends.first_token import read_first_token_only
from rankmill.workers.backends.openvino.recipe import FACTORS
from rankmill.workers.batches.tokens import Tokens, put_together
from rankmill.workers.host.disk_cache import cache_name
from rankmill.workers.models.loading import load
from rankmill.workers.models.sources import ModelCopies

ALPHA = 0.5
"""SmoothQuant's migration strength: 0.5 divides the loss of precision evenly between inputs and weights."""

_STEPS = 8
"""Smoothing factors are rounded to powers of the 8th root of 2. Otherwise the factors would depend on the
number of threads, because the model's rounding errors depend on this number.
"""

_TINY = 1e-5
_KINDS = (".json", ".jinja", ".txt", ".model", ".safetensors")
"""Endings of the model files to copy. Code and other formats of weights are left out."""


class Watched:
    """Observes a linear layer: the largest absolute input of each channel, ``[into]``, and the number of
    tokens.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.largest = torch.zeros(linear.in_features)
        self.tokens = 0

    def look(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Observe the inputs of the layer; PyTorch calls this hook before each forward pass."""
        hidden = inputs[0].flatten(0, -2)
        self.largest = torch.maximum(self.largest, hidden.abs().amax(0))
        self.tokens += len(hidden)

    @property
    def products(self) -> int:
        return self.tokens * self.linear.weight.numel()

    def factors(self) -> torch.Tensor:
        """Return the smoothing factor of each input channel, ``[into]``. Each channel is to be divided by its
        factor.
        """
        weights = self.linear.weight.detach().abs().amax(0).clamp(min=_TINY)
        exact = self.largest.clamp(min=_TINY) ** ALPHA / weights ** (1 - ALPHA)
        return torch.exp2(torch.round(torch.log2(exact) * _STEPS) / _STEPS)


def watch(classifier: Any, tokens: Tokens) -> dict[str, Watched]:
    """Run a classifier on tokenized pairs, and return observations of its linear layers by layer name.

    Parameters
    ----------
    classifier
        A classifier from `ModelFiles.classifier`, of one of the families `BERT_LIKE`. The classifier is
        changed to read only the first token in its last layer. A last projection to one output is not
        observed, because it is never in 8 bits.
    tokens
        Tokens of the pairs. The classifier gets one pair at a time, without padding.
    """
    watched = {
        name: Watched(module)
        for name, module in classifier.named_modules()
        if isinstance(module, nn.Linear) and module.out_features > 1
    }
    read_first_token_only(classifier)
    hooks = [layer.linear.register_forward_pre_hook(layer.look) for layer in watched.values()]
    with torch.inference_mode():
        for row in range(len(tokens.lengths)):
            batch = put_together([(tokens, np.array([row]))], 0)
            types = {} if batch.types is None else {"token_type_ids": torch.from_numpy(batch.types)}
            classifier(
                input_ids=torch.from_numpy(batch.ids), attention_mask=torch.from_numpy(batch.mask), **types
            )
    for hook in hooks:
        hook.remove()
    return {name: layer for name, layer in watched.items() if layer.tokens}


def calibrate(request: Mapping[str, Any]) -> dict[str, Any]:
    """Calibrate a model on the pairs of a request, and write the model with smoothing factors into an
    existing folder.

    The request is ``{"spec": {...}, "queries": [...], "passages": [...], "folder": "..."}``, and the answer
    is ``{"revision": ..., "digest": ..., "layers": {NAME: SHARE, ...}}``. ``SHARE`` is the layer's part of
    the multiplications in all of these layers; the shares add up to 1.

    Raises
    ------
    SpecError
        The model cannot be loaded, is of a family whose layers are unknown here, or has several outputs.
    OSError
        The folder cannot be written.
    """
    # Do not leave out `all_labels`: the error for several outputs would name --label, which quantize lacks.
    spec = ScoreSpec.model_validate({**request["spec"], "precision": "fp32", "all_labels": True})
    settings = load_settings()
    loaded = load(spec, "cpu", "openvino", settings.cache_dir, ModelCopies(settings))
    config = loaded.about.config
    if config.model_type not in BERT_LIKE:
        raise SpecError(
            f"model {spec.model} is a {config.model_type}, which quantize does not know: it "
            f"quantizes {', '.join(sorted(BERT_LIKE))}"
        )
    if (outputs := config.num_labels) != 1:
        raise SpecError(f"model {spec.model} has {outputs} outputs: quantize is for models with one")
    source, model = loaded.source, loaded.model(spec)
    tokens = model.tokenizer(request["queries"], request["passages"])
    watched = watch(ModelFiles(source, model.revision, None, Path()).classifier(), tokens)
    folder = Path(request["folder"])
    _copy(source, model.revision, folder)
    (folder / FACTORS).write_bytes(save({name: layer.factors() for name, layer in watched.items()}))
    whole = sum(layer.products for layer in watched.values())
    layers = {name: layer.products / whole for name, layer in watched.items()}
    return {"revision": model.revision, "digest": cache_name(source, model.revision), "layers": layers}


def _copy(source: str | Path, revision: str | None, folder: Path) -> None:
    if isinstance(source, str):
        from huggingface_hub import snapshot_download

        source = Path(
            snapshot_download(source, revision=revision, allow_patterns=[f"*{kind}" for kind in _KINDS])
        )
    for name, path in model_files(source).items():
        if path.suffix in _KINDS and not name.startswith("rankmill_"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
