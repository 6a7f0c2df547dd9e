"""Loads the configs and weights of transformers' models, and checks them. Every backend makes its own model
from these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.modules.module import register_module_module_registration_hook
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
from rankmill.workers.batches.layout import check_counts
from rankmill.workers.host.model_file import check_files, check_headers, checkpoint, read_json

_MODULES = 20
"""A config may describe 1,000 modules, and this many more for each tensor of the checkpoint. A config with
more modules is refused. Usual models have one or two modules for each tensor.
"""

_BUFFERS_BESIDE = 1 << 26
"""The buffers of a model may have twice as many numbers as its checkpoint has, plus this many. A config with
larger buffers is refused. Not all buffers are in the checkpoint: the model computes some, such as masks.
"""

_BUFFERS = ("position_ids", "token_type_ids")
"""Names of buffers that old releases of transformers saved with the weights. A checkpoint with such a buffer
is not refused, even if the model does not have the buffer.
"""


def check_size(kind: Any, source: str | Path, revision: str | None, config: Any) -> None:
    """Refuse a config that describes a far larger model than the checkpoint, before memory is allocated.
    Weights from the hub are also refused if the headers of their files are damaged.

    Raises
    ------
    SpecError
        The config describes more than twice the parameters of the checkpoint, or far more modules or buffers;
        or a file from the hub is damaged.
    WorkerError
        A model of the hub does not fit into the memory of this host.
    """
    files = checkpoint(source, revision)
    if isinstance(source, str):  # `locate` has checked the headers in a directory
        check_headers(files, source)
    shapes = [shape for file in files for shape in _shapes(file)]
    saved = sum(map(prod, shapes))
    if not saved:
        return
    packed = _PACKED if getattr(config, "quantization_config", None) else 1
    with torch.device("meta"), _at_most(_MODULES * len(shapes) + 1000, source):
        wanted = kind.from_config(config, trust_remote_code=False)
    for noun, tensors, most in (
        ("parameters", wanted.parameters(), 2 * saved * packed),
        ("numbers in buffers", wanted.buffers(), 2 * saved * packed + _BUFFERS_BESIDE),
    ):
        described = sum(tensor.numel() for tensor in tensors)
        if described > most:
            raise SpecError(
                f"model {source} has {saved:,} parameters, but its config.json describes {described:,} {noun}"
            )


_PACKED = 16
"""In a quantized checkpoint, at most this many weights are packed into one number."""


@contextmanager
def _at_most(modules: int, source: str | Path) -> Iterator[None]:
    """Stop a model's construction with a `SpecError` when it has more than `modules` modules."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > modules:
            raise SpecError(f"model {source} has a config.json that describes more than {modules:,} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def check_names(source: str | Path, model: Any, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks some of the model's weights, or contains weights of another
    architecture.

    Parameters
    ----------
    source
        Directory or hub id, for the messages of errors.
    model
        The model from transformers, which fills missing weights with random numbers.
    report
        What transformers reports about the weights (``output_loading_info``).

    Raises
    ------
    SpecError
        The checkpoint is not one of this model; the message names a weight.
    """
    headless = model.base_model is model  # a model without a head on top does not use its pooler
    missing = [name for name in report["missing_keys"] if not (headless and name.startswith("pooler."))]
    if missing:
        raise SpecError(
            f"model {source} has no {_listed(missing)}: it is not a cross-encoder, "
            f"or not a {model.config.model_type} as its config.json says"
        )
    if report["mismatched_keys"]:
        name, shape, wanted = min(report["mismatched_keys"])
        raise SpecError(
            f"model {source} has a weight {name} of shape {list(shape)}, "
            f"where its config.json wants {list(wanted)}"
        )
    foreign = [name for name in report["unexpected_keys"] if _is_foreign(name, model)]
    if foreign:
        raise SpecError(
            f"model {source} has {_listed(foreign)}, which a {model.config.model_type} as in its config.json "
            "does not have: it is of another architecture, and its scores would be wrong"
        )


def _is_foreign(name: str, model: Any) -> bool:
    """Return whether an unexpected weight in the checkpoint shows that the model is of another architecture.

    Weights outside the model's body and head are harmless, and so is a pooler that the head does not read.
    """
    modules = {path for path, _ in model.named_modules()}
    parent, body = name, model.base_model_prefix
    while parent not in modules:
        parent = parent.rpartition(".")[0]
    unused = name.startswith(f"{body}.pooler.") and parent == body
    return parent != "" and not unused and name.rpartition(".")[2] not in _BUFFERS


def _shapes(file: Path) -> list[list[int]]:
    with safe_open(file, "pt") as tensors:
        return [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more weights" if others else f"weight {first}"


def own_memory(module: Any) -> Any:
    """Copy a module's weights into memory of the process. Weights that are only mapped from a file would
    change if the file were overwritten.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
    return module


transformers_logging.disable_progress_bar()  # a worker's log is not a terminal
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in record.getMessage()  # `check_names` reports what matters
)


def load_config(source: str | Path, revision: str | None) -> Any:
    """Load the config of a model, and check it.

    Parameters
    ----------
    source
        Directory or hub id.
    revision
        Branch, tag or commit on the hub.

    Raises
    ------
    SpecError
        Transformers would compute something other than what the config describes, the config has huge counts,
        or the files have an adapter or name files of this host.
    OSError, ValueError
        From transformers, if the model does not exist.
    """
    check_files(source, revision)
    check_counts(source, read_json(source, revision, "config.json", dict))
    config = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    other = _other_architecture(config)
    if other:
        raise SpecError(
            f"model {source} is not a {config.model_type} as transformers has it ({other} in its "
            "config.json), and code from model repositories is never run"
        )
    return config


def is_language_model(config: Any) -> bool:
    """Return whether transformers' classifier for this config is a language model with a head that reads the
    last token.
    """
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return isinstance(kind, type) and issubclass(kind, GenericForSequenceClassification)


def _other_architecture(config: Any) -> str | None:
    """Return a config's entry that contradicts the architecture which transformers would build.

    If no entry contradicts it, return ``None``.
    """
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
    """Load the model as a sequence classifier; see `load_pretrained`."""
    return load_pretrained(AutoModelForSequenceClassification, source, revision, config)


def load_pretrained(kind: Any, source: str | Path, revision: str | None, config: Any) -> Any:
    """Load a model on the CPU, in float32 and in evaluation mode.

    Parameters
    ----------
    kind
        ``AutoModel`` or another of transformers' Auto classes.
    source, revision
        Directory or hub id, and the branch, tag or commit on the hub.
    config
        From `load_config`.

    Raises
    ------
    SpecError
        The weights do not fit the config, the config describes a far larger model than the checkpoint, or a
        file from the hub is damaged.
    WorkerError
        A check before loading finds that a model from the hub does not fit into this host's memory.
    MemoryError
        The host's memory was used up while the model was loaded.
    OSError, ValueError
        From transformers, if the weights are not safetensors or cannot be read.
    """
    check_size(kind, source, revision, config)
    try:
        model, report = kind.from_pretrained(
            source,
            revision=revision or "main",
            config=config,
            dtype=torch.float32,
            # None lets transformers choose: some families (DeBERTa) have no sdpa
            attn_implementation="sdpa" if config.model_type in TRACEABLE else None,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # `check_names` refuses mismatched sizes with a clear message
            output_loading_info=True,
        )
    except RuntimeError as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise
    check_names(source, model, report)
    return model.eval()
