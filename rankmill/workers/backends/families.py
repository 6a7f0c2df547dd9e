"""Facts about model families, by transformers' ``model_type``. This module imports no model code."""

from __future__ import annotations

from typing import Any

BERT_LIKE = frozenset({"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
"""BERT and similar families, whose classifiers read only the first token."""

TRACEABLE = BERT_LIKE | {"modernbert"}
"""Families for which `rankmill.workers.backends.traceable` makes the attention masks, if a classifier with
one output is converted for OpenVINO or ONNX.
"""

POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm",
     "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)  # fmt: skip
"""Families in which the position ids of tokens begin after the id of the padding token, not at 0."""


def reads_first_token(config: Any) -> bool:
    """Return whether a classifier with this config is known to score by the first token only."""
    match config.model_type:
        case "modernbert":
            return getattr(config, "classifier_pooling", None) == "cls"
        # a convolution over all tokens follows the first layer, so the first layer must not be the last one
        case "deberta-v2":
            return config.num_hidden_layers > 1 or not getattr(config, "conv_kernel_size", 0)
        case kind:
            return kind in BERT_LIKE


def first_position(config: Any) -> int:
    """Return the position id that a model with this config gives to a row's first token."""
    if config.model_type not in POSITIONS_AFTER_PADDING:
        return 0
    # MPNet's code takes 1 as the padding id, whatever the config says
    return 1 + (1 if config.model_type == "mpnet" else int(config.pad_token_id))
