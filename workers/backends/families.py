"""Facts about model families, by transformers' ``model_type``; imports no model."""

from __future__ import annotations

from typing import Any

FIRST_TOKEN = frozenset({"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
"""Families whose classifiers take their score from the first token alone."""

POSITIONS_AFTER_PADDING = frozenset({"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""Families whose positions begin after the id of the padding token."""


def reads_first_token(config: Any) -> bool:
    """Whether a model with this config is of a family known to read the first token only."""
    return config.model_type in FIRST_TOKEN


def first_position(config: Any) -> int:
    """The position id of a row's first token."""
    return int(config.pad_token_id) + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
