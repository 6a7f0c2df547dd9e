"""Runs classifiers of BERT and similar families in MLX, with MLX's own modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx import nn
from mlx.utils import tree_flatten

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.backends.base import Backend, Logits, OutOfMemory
from rankmill.workers.backends.families import first_position
from rankmill.workers.batches.tokens import Batch

_DTYPES = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}
_BITS = {"int8": 8, "int4": 4}

_GROUP = 32
"""In 8 and 4 bits, this many weights share a scale. This is the smallest number that MLX allows; small models
need a fine scale.
"""

_FINENESS = 16
"""The number of rows and the number of tokens in a batch are each rounded up, so that MLX compiles a model
for only a few shapes. Each number grows by less than 1/16.
"""


class MlxBackend(Backend):
    """A BERT-family sequence classifier in MLX's own modules.

    With ``int8`` and ``int4`` the weights of the layers and of the word embeddings have 8 and 4 bits. The
    rest is computed in fp16 on a GPU and in fp32 on a CPU, and the head always in fp32.

    Parameters
    ----------
    classifier
        From `load_classifier`, of a family that `reads_first_token`.
    device
        ``mps`` or ``cpu``.
    precision
        ``fp32``, ``fp16``, ``bf16``, ``int8`` or ``int4``.
    compiled
        Whether MLX fuses operations. By default, operations are fused only on a GPU, because fusing on a CPU
        needs a C++ compiler and takes seconds.

    Raises
    ------
    SpecError
        The backend lacks the model's activation function.
    """

    name = "mlx"
    depth = 2

    def __init__(self, classifier: Any, device: str, precision: str, compiled: bool | None = None) -> None:
        self.device = device
        self.precision = f"{precision} weights" if precision in _BITS else precision
        self._where = mx.gpu if device == "mps" else mx.cpu
        self._compiled = device == "mps" if compiled is None else compiled
        with mx.stream(self._where):
            model = _Classifier(classifier.config)
            model.load_weights(_weights(classifier))
            if precision in _BITS:
                nn.quantize(model, _GROUP, _BITS[precision], class_predicate=_is_quantized)
            head = model.out.parameters()
            model.set_dtype(_DTYPES.get(precision, mx.float16 if device == "mps" else mx.float32))
            model.out.update(head)
            mx.eval(model.parameters())
        self.bytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        self._run: Callable[..., mx.array] = mx.compile(model) if self._compiled else model

    def submit(self, batch: Batch) -> MlxForward:
        """Begin the forward of a batch, which MLX computes in its own thread; raises `OutOfMemory`."""
        rows, longest = batch.ids.shape
        ids, types, mask = batch.ids, batch.types, batch.mask
        if self._compiled:
            room = ((0, _rounded(rows) - rows), (0, _rounded(longest) - longest))
            ids, mask = np.pad(ids, room), np.pad(mask, room)
            types = None if types is None else np.pad(types, room)
            mask[rows:] = 1  # because attention over a row without tokens is undefined
        try:
            with mx.stream(self._where):
                inputs = [mx.array(ids.astype(np.int32))]
                inputs.append(mx.array(np.zeros_like(ids[:1]) if types is None else types))
                if not mask.all():
                    inputs.append(mx.array(mask[:, None, None, :].astype(bool)))
                logits = self._run(*inputs)
                mx.async_eval(logits)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise _explained(error) from error
        return MlxForward(logits, rows)


class MlxForward:
    """Logits of a batch, which MLX may still be computing."""

    def __init__(self, logits: mx.array, rows: int) -> None:
        self._logits = logits
        self._rows = rows

    def result(self) -> Logits:
        try:
            return np.array(self._logits)[: self._rows]
        except RuntimeError as error:
            raise _explained(error) from error


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, inner: int, heads: int, activation: str, epsilon: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.attended = (nn.Linear(width, width) for _ in range(4))
        self.attended_norm = nn.LayerNorm(width, epsilon)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, epsilon)
        self._heads = heads
        if activation not in _ACTIVATIONS:
            raise SpecError(
                f"backend mlx cannot be used: it has no activation function {activation}; use --backend torch"
            )
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, hidden: mx.array, mask: mx.array | None, *, first: bool) -> mx.array:
        """Compute this layer's output ``[rows, tokens, width]``; with `first`, only for each row's first
        token.
        """
        asking = hidden[:, :1] if first else hidden
        heads = [
            self._by_head(states) for states in (self.query(asking), self.key(hidden), self.value(hidden))
        ]
        context = mx.fast.scaled_dot_product_attention(*heads, scale=heads[0].shape[-1] ** -0.5, mask=mask)
        context = mx.flatten(context.transpose(0, 2, 1, 3), 2, 3)
        attended = self.attended_norm(asking + self.attended(context))
        output: mx.array = self.output_norm(attended + self.down(self._activation(self.up(attended))))
        return output

    def _by_head(self, states: mx.array) -> mx.array:
        return mx.unflatten(states, -1, (self._heads, -1)).transpose(0, 2, 1, 3)


class _Classifier(nn.Module):  # type: ignore[misc]
    """A classifier that computes logits ``[rows]`` from token ids. Its last layer computes only the first
    token.

    The head, ``out``, is in float32 in every precision (see `rankmill.workers.backends.head`).

    Parameters
    ----------
    config
        The config of a transformers model; most of its names are the same in all families.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, epsilon = config.hidden_size, getattr(config, "layer_norm_eps", 1e-12)
        embedded = getattr(config, "embedding_size", width)
        self.words = nn.Embedding(config.vocab_size, embedded)
        self.positions = nn.Embedding(config.max_position_embeddings, embedded)
        if hasattr(config, "type_vocab_size"):
            self.types = nn.Embedding(config.type_vocab_size, embedded)
        self.norm = nn.LayerNorm(embedded, epsilon)
        if embedded != width:
            self.project = nn.Linear(embedded, width)
        inner = getattr(config, "hidden_dim", None) or config.intermediate_size
        activation = getattr(config, "activation", None) or config.hidden_act
        shape = width, inner, config.num_attention_heads, activation, epsilon
        self.layers = [_Layer(*shape) for _ in range(config.num_hidden_layers)]
        self.dense, self.out = nn.Linear(width, width), nn.Linear(width, 1)
        self._squash = {"electra": nn.gelu, "distilbert": nn.relu}.get(config.model_type, mx.tanh)
        self._begin = first_position(config)

    def __call__(self, ids: mx.array, types: mx.array, mask: mx.array | None = None) -> mx.array:
        """Compute logits; ``mask``, ``[rows, 1, 1, tokens]``, is false for tokens without attention."""
        places = mx.arange(ids.shape[1])
        if self._begin:
            padding = self._begin - 1
            # In these families, tokens with the padding id share one position, even if a text contains them.
            counted = (ids != padding).astype(mx.int32)
            places = mx.cumsum(counted, axis=1) * counted + padding
        # The rounded length may exceed the number of positions. Only padding lies beyond the last position.
        end = self.positions.weight.shape[0] - 1
        hidden = self.words(ids) + self.positions(mx.minimum(places, end))
        if "types" in self:
            hidden += self.types(types)
        hidden = self.norm(hidden)
        if "project" in self:
            hidden = self.project(hidden)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, mask, first=False)
        hidden = self.layers[-1](hidden, mask, first=True)
        last = self._squash(self.dense(hidden[:, 0])).astype(mx.float32)
        logits: mx.array = (last * self.out.weight).sum(-1) + self.out.bias
        return logits


_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {"gelu": nn.gelu, "relu": nn.relu}

_NAMES = [
    (r"embeddings\.(word|position|token_type)_embeddings\.", r"\1s."),
    (r"^token_types", "types"),
    (r"embeddings\.LayerNorm", "norm"),
    (r"embeddings_project", "project"),
    (r"^(encoder|transformer)\.layer\.", "layers."),
    (r"attention\.self\.", ""),
    (r"attention\.(q_lin|k_lin|v_lin|out_lin)", r"\1"),
    (r"attention\.output\.dense|out_lin", "attended"),
    (r"attention\.output\.LayerNorm|sa_layer_norm", "attended_norm"),
    (r"q_lin", "query"),
    (r"k_lin", "key"),
    (r"v_lin", "value"),
    (r"intermediate\.dense|ffn\.lin1", "up"),
    (r"output\.dense|ffn\.lin2", "down"),
    (r"output\.LayerNorm|output_layer_norm", "output_norm"),
    (r"pooler\.dense|classifier\.dense|pre_classifier", "dense"),
    (r"classifier\.out_proj|classifier", "out"),
]
"""Patterns and replacements that turn transformers' names of weights into those of `_Classifier`. They are
applied in this order, to names without the model's prefix.
"""


def _weights(classifier: Any) -> list[tuple[str, mx.array]]:
    weights = []
    for name, tensor in classifier.state_dict().items():
        here = name.removeprefix(f"{classifier.base_model_prefix}.")
        for pattern, replacement in _NAMES:
            here = re.sub(pattern, replacement, here)
        if tensor.dtype is torch.float32:  # other types are buffers of position ids, not weights
            weights.append((here, mx.array(tensor.numpy())))
    return weights


def _is_quantized(path: str, module: nn.Module) -> bool:
    """Return whether a module gets 8-bit or 4-bit weights. Only the matrices of the layers and the word
    embeddings get such weights, if `_GROUP` divides the length of a row of the matrix.
    """
    large = (isinstance(module, nn.Linear) and path.startswith("layers")) or path == "words"
    return large and module.weight.shape[-1] % _GROUP == 0


def _rounded(count: int) -> int:
    step = max(1, (1 << count.bit_length() - 1) // _FINENESS)
    return -(-count // step) * step


def _explained(error: RuntimeError) -> Exception:
    """Return the error to raise for an error of MLX. If MLX ran out of memory, free MLX's cache and return
    `OutOfMemory`. Any other error is returned unchanged.
    """
    if not any(sign in str(error) for sign in ("malloc", "Insufficient Memory")):
        return error
    mx.clear_cache()
    return OutOfMemory(str(error))
