"""Makes PyTorch modules from which tracing can make graphs for OpenVINO and ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.backends.classifier import own_memory
from rankmill.workers.backends.families import TRACEABLE
from rankmill.workers.backends.first_token import read_first_token_only
from rankmill.workers.backends.head import cast_all_but_head, heads_of
from rankmill.workers.backends.torch.networks import load_network
from rankmill.workers.batches.tokens import INPUTS


def traceable(files: ModelFiles, change: Callable[[Any], None] = lambda classifier: None) -> Traced:
    """Load the model of `files` as a module that can be traced.

    Parameters
    ----------
    files
        The model's files.
    change
        Called with the loaded model, if it is a one-output classifier of a family in `TRACEABLE`.
    """
    config = files.config
    if files.layout.task != "classifier" or config.model_type not in TRACEABLE or config.num_labels != 1:
        return TracedNetwork(own_memory(load_network(files)), config)
    classifier = own_memory(files.classifier())
    change(classifier)
    return Traceable(classifier)


class TracedNetwork(nn.Module):
    """A traceable module that computes logits ``[rows]`` or ``[rows, outputs]`` with a model of any family.

    Parameters
    ----------
    network
        From `load_network`.
    config
        The model's config.
    """

    def __init__(self, network: Any, config: Any) -> None:
        super().__init__()
        cast_all_but_head(network, torch.float32, network.heads)
        if network.model.config._attn_implementation == "sdpa":
            network.model.set_attn_implementation(_TRACED)
        self.network = network
        self.inputs = INPUTS if (getattr(config, "type_vocab_size", 0) or 0) > 1 else INPUTS[:2]

    def example(self) -> tuple[Tensor, ...]:
        """Make inputs to trace the module with. One row is padded, so that the trace contains the code for
        masks.
        """
        inputs = [torch.ones(2, 16, dtype=torch.long) for _ in self.inputs]
        inputs[1][0, 12:] = 0
        return tuple(inputs)

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        logits: Tensor = self.network(ids, mask, types)
        return logits[:, 0] if logits.shape[1] == 1 else logits


_TRACED = "rankmill_traced"
"""Name under which PyTorch's attention with the masks of `_mask` is registered with transformers."""


def _mask(*sizes: Any, **options: Any) -> Tensor | None:
    """Make transformers' mask; but if it lets a token see no token at all, let this token see all tokens.

    With a sliding window, padding may be too far from the row's tokens to see any. For such a token,
    OpenVINO's attention returns NaN, and in the next layer NaN reaches the row's other tokens. What padding
    sees changes no score.
    """
    mask: Tensor | None = sdpa_mask(*sizes, **options)
    return None if mask is None else mask | ~mask.any(dim=-1, keepdim=True)


AttentionInterface.register(_TRACED, sdpa_attention_forward)
AttentionMaskInterface.register(_TRACED, _mask)


_MASKED = -10_000.0
"""This number is added to the attention scores of padding, so that padding gets the weight 0. The number fits
into fp16 and bf16.
"""


class Traceable(nn.Module):
    """A module that computes logits ``[rows]`` from token ids, mask and, if the model has types, types.

    The classifier gets a finished attention mask. Transformers' own code for the mask depends on the values
    of `mask`, and a trace cannot contain such code.

    Parameters
    ----------
    classifier
        From `load_classifier`, of a family in `TRACEABLE`; its last layer is replaced if the score reads only
        the first token.
    """

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        read_first_token_only(classifier)
        cast_all_but_head(classifier, torch.float32, heads_of(classifier))
        self.classifier = classifier
        types = getattr(classifier.config, "type_vocab_size", 0) > 1
        self.inputs = INPUTS if types else INPUTS[:2]

    def example(self) -> tuple[Tensor, ...]:
        return tuple(torch.ones(2, 16, dtype=torch.long) for _ in self.inputs)

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        attention = (1 - mask[:, None, None, :]).to(torch.float32) * _MASKED
        if self.classifier.config.model_type == "modernbert":
            return self._modernbert(ids, mask, attention)
        segments = {} if types is None else {"token_type_ids": types}
        logits: Tensor = self.classifier(input_ids=ids, attention_mask=attention, **segments).logits
        return logits[:, 0]

    def _modernbert(self, ids: Tensor, mask: Tensor, attention: Tensor) -> Tensor:
        """Compute what `ModernBertForSequenceClassification` does, with a mask for each kind of attention."""
        config = self.classifier.config
        places = torch.arange(ids.shape[1])
        distant = (places[:, None] - places).abs() > config.sliding_window
        masks = {
            "full_attention": attention,
            "sliding_attention": attention + distant.to(torch.float32) * _MASKED,
        }
        hidden = self.classifier.model(input_ids=ids, attention_mask=masks).last_hidden_state
        if config.classifier_pooling == "cls":
            pooled = hidden[:, 0]
        else:
            pooled = (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        logits: Tensor = self.classifier.classifier(self.classifier.head(pooled))
        return logits[:, 0]


Traced = Traceable | TracedNetwork
