"""The `transformers` sequence classifier that every backend starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from jobs.errors import SpecError
from workers.backends.families import reads_first_token


def load_config(source: str | Path, revision: str | None) -> Any:
    """The config of a model with one output.

    Parameters
    ----------
    source
        Directory or hub id.
    revision
        Branch, tag or commit on the hub.

    Raises
    ------
    SpecError
        The model has another number of outputs than one.
    OSError, ValueError
        From transformers, when there is no such model.
    """
    config = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    if config.num_labels != 1:
        raise SpecError(
            f"model {source} has {config.num_labels} outputs, but a score needs exactly one: "
            "use a cross-encoder with num_labels=1"
        )
    return config


def load_classifier(source: str | Path, revision: str | None, config: Any) -> Any:
    """The model in evaluation mode, in float32, on the CPU.

    Parameters
    ----------
    source, revision
        As in `load_config`.
    config
        From `load_config`.

    Raises
    ------
    OSError, ValueError
        From transformers, when the weights are not safetensors or cannot be read.
    """
    model = AutoModelForSequenceClassification.from_pretrained(
        source,
        revision=revision or "main",
        config=config,
        dtype=torch.float32,
        # None: what transformers thinks best; some families (DeBERTa) cannot have sdpa
        attn_implementation="sdpa" if reads_first_token(config) else None,
        use_safetensors=True,
        trust_remote_code=False,
    )
    return model.eval()
