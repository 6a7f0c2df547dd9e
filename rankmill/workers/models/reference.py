"""Computes the right logits of probes (pairs that check a worker's scores) with transformers, row by row.

A worker's logits are compared with these, so this module shares little with a worker's code: it has its own
tokens (`reference_tokens`), poolings and activation, and transformers' own forward. The module takes one row
at a time, and pads only to measure what padding changes.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import MATRIX, ROW, Logits, Rounding
from rankmill.workers.backends.torch.chain import modes_of
from rankmill.workers.batches.layout import SavedModule
from rankmill.workers.host.model_file import model_file
from rankmill.workers.models.description import read
from rankmill.workers.models.prompts import answers
from rankmill.workers.models.reference_tokens import ReferenceTokens, Row

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = {
    "classifier": AutoModelForSequenceClassification,
    "chain": AutoModel,
    "causal": AutoModelForCausalLM,
}


class ReferenceModel:
    """A model whose logits transformers computes, one row at a time.

    Parameters
    ----------
    spec
        The model and its prompt template.
    source, revision
        As in `rankmill.workers.backends.base.ModelFiles`.
    """

    def __init__(self, spec: ScoreSpec, source: str | Path, revision: str | None) -> None:
        self._source, self._revision, self._device = source, revision, "cpu"
        self._about = description = read(source, revision)  # not the cached description
        self._inputs = spec.inputs
        self.tokens = ReferenceTokens(spec, description)
        self._answers = answers(spec, description) if description.layout.task == "causal" else None
        self._model = _KINDS[description.layout.task].from_pretrained(
            source, revision=revision if isinstance(source, str) else None, config=description.config,
            dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        ).eval()  # fmt: skip
        self._padding = getattr(self._model.config.get_text_config(), "pad_token_id", None)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], beside: Row | None = None) -> Logits:
        """Compute the logits ``[rows, outputs]`` of tokenized rows, one row at a time.

        If the longer row `beside` is given, each row is padded to the length of `beside`, and the two are
        computed in one batch.
        """
        return np.stack([self._one(row, beside) for row in rows])

    def _one(self, row: Row, beside: Row | None) -> Logits:
        length, padding = len(row["input_ids"]), self._padding
        if beside is not None and (padding is None or padding < 0):  # some configs say -1
            used = {*row["input_ids"], *beside["input_ids"]}
            padding = next(number for number in count() if number not in used)
        # a head that reads the last token skips only tokens with this id
        self._model.config.get_text_config().pad_token_id = padding
        fill = {"input_ids": padding or 0}
        named = {
            name: torch.tensor(_padded(ids, None if beside is None else beside[name], fill.get(name, 0)))
            for name, ids in row.items()
        }
        outputs = self._model(**{name: ids.to(self._device) for name, ids in named.items()})
        if self._about.layout.task == "chain":
            logits = self._chain(outputs.last_hidden_state[0, :length])
        elif self._answers is not None:
            yes, no = self._answers
            last = outputs.logits[0, length - 1].float()
            logits = last[yes : yes + 1] if no is None else last[yes : yes + 1] - last[no : no + 1]
        else:
            logits = outputs.logits[0]
        result: Logits = logits.float().cpu().numpy()
        return result

    def _chain(self, hidden: Tensor) -> Tensor:
        """Apply the modules after the transformer to the states ``[tokens, width]`` of one row."""
        states = {"token_embeddings": hidden}
        for step in self._about.layout.steps:
            config = step.config
            read = str(config.get("module_input_name") or "sentence_embedding")
            into = str(config.get("module_output_name") or read)
            if step.kind == "Pooling":
                states["sentence_embedding"] = _pooled(states["token_embeddings"], config)
            elif step.kind == "Normalize":
                states[into] = functional.normalize(states[read], dim=-1)
            else:
                weights = self._weights(step, hidden)
                apply = _normed if step.kind == "LayerNorm" else _dense
                states[into] = apply(states[read], weights, config)
        return states["scores"]

    def _weights(self, step: SavedModule, like: Tensor) -> dict[str, Tensor]:
        file = model_file(self._source, self._revision, f"{step.path}/model.safetensors")
        assert file is not None  # the worker has loaded the model, which needs this file
        return {name: tensor.to(like) for name, tensor in load_file(file).items()}

    def cast(self, precision: str, device: str, rounding: Rounding | None) -> None:
        """Move the model to a device, and compute in another precision from now on.

        Precisions of 8 and 4 bits are simulated by rounding values as `rounding` says.
        """
        self._device = device
        if precision in _DTYPES:
            self._model.to(device, _DTYPES[precision])
            return
        self._model.to(device)
        assert rounding is not None
        inputs = precision if precision == "fp8" else "int8"
        for module in self._model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = _rounded(module.weight.data, precision, rounding.weights)
                if rounding.inputs is not None:
                    module.register_forward_pre_hook(
                        lambda _, given: (_rounded(given[0], inputs, rounding.inputs),)
                    )

    def scores(self, logits: Logits) -> dict[str, Logits]:
        """Return the scores of logits ``[rows, outputs]`` for each activation that a spec may name, by its
        name.
        """
        outputs, several = torch.from_numpy(logits), logits.shape[1] > 1
        apart = getattr(self._model.config, "problem_type", None) == "multi_label_classification"
        probability = outputs.softmax(-1) if several and not apart else outputs.sigmoid()
        scores = {"identity": outputs, "sigmoid": outputs.sigmoid(), "probability": probability}
        path = self._about.layout.activation
        if path is None:
            of_pair = not several and self._inputs == "pairs"
            path = "torch.nn.Sigmoid" if of_pair else "torch.nn.Identity"
        with suppress(Exception):  # for example, the class needs arguments
            scores["default"] = getattr(nn, path.rpartition(".")[2])()(outputs)
            if several:
                scores["softmax"] = scores["default"].softmax(-1)
        return {activation: values.numpy() for activation, values in scores.items()}

    def labels(self, outputs: int) -> list[str]:
        """Return the name of each of the model's outputs, or its number if it has no name.

        `outputs` is the number of outputs.
        """
        names = self._model.config.id2label if self._about.layout.task == "classifier" else {}
        return [str(names.get(number, number)) for number in range(outputs)]

    def close(self) -> None:
        del self._model
        gc.collect()


def _padded(ids: list[int], beside: list[int] | None, padding: int) -> list[list[int]]:
    """Make a batch of one row, or of two: a row and the longer row `beside`, padded to the same length."""
    return [ids] if beside is None else [ids + [padding] * (len(beside) - len(ids)), beside]


def _rounded(values: Tensor, precision: str, together: int | None) -> Tensor:
    """Round values to 8 or 4 bits; each group of `together` values shares a scale."""
    if together is None:
        return values
    width = values.shape[-1]
    size = {ROW: width, MATRIX: values.numel()}.get(together, together)
    filled = functional.pad(values, (0, -width % size)) if together > 0 else values
    parts = filled.reshape(-1, size)
    largest = parts.abs().amax(1, keepdim=True).clamp(min=1e-12)
    if precision == "fp8":
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        steps = (parts / scale).to(torch.float8_e4m3fn).to(parts)
    else:
        bits = 4 if precision.startswith("int4") else 8
        scale = largest / (2 ** (bits - 1) - 1)
        steps = (parts / scale).round()
    rounded: Tensor = (steps * scale).reshape(filled.shape)[..., :width]
    return rounded


def _pooled(hidden: Tensor, config: dict[str, Any]) -> Tensor:
    whole, count = hidden.float(), len(hidden)
    weights = torch.arange(1, count + 1, device=hidden.device)[:, None].float()
    by_mode = {
        "cls": hidden[0],
        "max": hidden.amax(0),
        "mean": whole.mean(0),
        "mean_sqrt_len_tokens": whole.sum(0) / count**0.5,
        "weightedmean": (whole * weights).sum(0) / weights.sum(),
        "lasttoken": hidden[-1],
    }
    return torch.cat([by_mode[mode].to(hidden.dtype) for mode in modes_of(config)])


def _dense(states: Tensor, weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    function = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    out: Tensor = getattr(nn, function.rpartition(".")[2])()(
        functional.linear(states, weights["linear.weight"], weights.get("linear.bias"))
    )
    if not config.get("use_residual"):
        return out
    around = weights.get("residual.weight")
    return out + (states if around is None else functional.linear(states, around))


def _normed(states: Tensor, weights: dict[str, Tensor], _: dict[str, Any]) -> Tensor:
    normed: Tensor = functional.layer_norm(states, states.shape, weights["norm.weight"], weights["norm.bias"])
    return normed
