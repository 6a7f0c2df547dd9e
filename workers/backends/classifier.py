"""Models of transformers that every backend starts from: config and weights, checked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.backends.families import TRACEABLE, reads_first_token
from rankmill.workers.backends.weights import check_names, check_size

transformers_logging.disable_progress_bar()  # a worker's log is not a terminal
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in record.getMessage()  # `check_names` reports what matters
)


def load_config(source: str | Path, revision: str | None) -> Any:
    """The config of a model.

    Parameters
    ----------
    source
        Directory or hub id.
    revision
        Branch, tag or commit on the hub.

    Raises
    ------
    SpecError
        Transformers would compute something other than the config describes.
    OSError, ValueError
        From transformers, when there is no such model.
    """
    config = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    if getattr(config, "num_hidden_layers", 0) > _MOST_LAYERS:
        raise SpecError(
            f"model {source} has {config.num_hidden_layers:,} layers in its config.json, "
            f"but at most {_MOST_LAYERS:,} are allowed"
        )
    other = _other_architecture(config)
    if other:
        raise SpecError(
            f"model {source} is no {config.model_type} as transformers has it ({other} in its config.json), "
            "and code from model repositories is never run"
        )
    return config


_MOST_LAYERS = 1000


def is_language_model(config: Any) -> bool:
    """Whether transformers' classifier with this config reads the last token of a language model."""
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return isinstance(kind, type) and issubclass(kind, GenericForSequenceClassification)


def _other_architecture(config: Any) -> str | None:
    """The entry of a config that describes another architecture than transformers would build, if any."""
    kind = config.model_type
    native = {
        "AutoConfig": type(config).__name__,
        "AutoModel": MODEL_MAPPING_NAMES.get(kind),
        "AutoModelForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind),
        "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind),
    }
    for name, code in (getattr(config, "auto_map", None) or {}).items():
        if name in native and str(code).rpartition(".")[2] != native[name]:
            return f"auto_map: {code}"
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    if positions != "absolute" and not hasattr(type(config)(), "position_embedding_type"):
        return f"position_embedding_type: {positions}"
    if getattr(config, "is_decoder", False) and reads_first_token(config):
        return "is_decoder: true"
    return None


def load_classifier(source: str | Path, revision: str | None, config: Any) -> Any:
    """The sequence classifier; as `load_pretrained`."""
    return load_pretrained(AutoModelForSequenceClassification, source, revision, config)


def load_pretrained(kind: Any, source: str | Path, revision: str | None, config: Any) -> Any:
    """The model in evaluation mode, in float32, on the CPU.

    Parameters
    ----------
    kind
        ``AutoModel`` or another class of that sort.
    source, revision
        As in `load_config`.
    config
        From `load_config`.

    Raises
    ------
    SpecError
        The weights are not those of a model with this config.
    MemoryError
        The model does not fit into the memory of this machine.
    OSError, ValueError
        From transformers, when the weights are not safetensors or cannot be read.
    """
    check_size(kind, source, revision, config)
    try:
        model, report = _load(kind, source, revision, config)
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise
    check_names(source, model, report)
    return model.eval()


def _load(kind: Any, source: str | Path, revision: str | None, config: Any) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers reports about its weights."""
    found: tuple[Any, dict[str, Any]] = kind.from_pretrained(
        source,
        revision=revision or "main",
        config=config,
        dtype=torch.float32,
        # None: transformers chooses; some families (DeBERTa) have no sdpa
        attn_implementation="sdpa" if config.model_type in TRACEABLE else None,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # `check_names` refuses them, with a clear message
        output_loading_info=True,
    )
    return found
