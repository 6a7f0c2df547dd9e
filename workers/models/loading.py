"""Loading a model: from a name to something that turns text into scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from jobs.errors import SpecError
from jobs.spec import ScoreSpec
from workers.backends.base import Backend, Logits, ModelFiles
from workers.backends.classifier import load_config
from workers.backends.families import first_position
from workers.backends.registry import BACKENDS, Choice, choose_backend
from workers.disk_cache import cache_folder
from workers.models.tokenizer import PairTokenizer

DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo-model"

transformers_logging.disable_progress_bar()  # a worker's log is no terminal
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model ready to score: text to ids, ids to logits, logits to scores."""

    name: str
    tokenizer: PairTokenizer
    backend: Backend
    activation: Callable[[Logits], Logits]
    revision: str | None


@dataclass(frozen=True)
class Loaded:
    """Tokenizer and weights, which serve any length and activation."""

    config: Any
    tokenizer: Any
    backend: Backend
    revision: str | None

    def model(self, spec: ScoreSpec) -> Model:
        """What scores as `spec` says.

        Raises
        ------
        SpecError
            The length or the activation cannot be had of this model.
        """
        return Model(
            name=spec.model,
            tokenizer=PairTokenizer(self.tokenizer, _max_length(spec, self.config, self.tokenizer)),
            backend=self.backend,
            activation=_activation(spec, self.config),
            revision=self.revision,
        )


def load_model(spec: ScoreSpec, device: str, backend: str = "auto", cache_dir: str = "auto") -> Model:
    """`load` a model for one spec."""
    return load(spec, device, backend, cache_dir).model(spec)


def load(spec: ScoreSpec, device: str, backend: str, cache_dir: str) -> Loaded:
    """Load tokenizer and weights.

    Parameters
    ----------
    spec
        What to score with.
    device
        ``cpu``, ``cuda`` or ``mps``.
    backend
        ``auto``, or one of those in `workers.backends.registry`.
    cache_dir
        Folder for what is made from models, or ``auto``.

    Raises
    ------
    SpecError
        There is no such model, it is no cross-encoder, it has no safetensors, or it cannot run
        with the precision or backend asked for.
    """
    started = time.monotonic()
    source = _locate(spec.model)
    try:
        config = load_config(source, spec.revision)
        files = ModelFiles(source, spec.revision, config, cache_folder(cache_dir))
        choice = choose_backend(backend, spec.precision, config, device, files.cache)
        runner = _load_backend(choice, files, device)
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=spec.revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise SpecError(_cannot_load(spec, error)) from error
    seconds = time.monotonic() - started
    logger.info("loaded %s in %.1f s: %s, %s, %s", spec.model, seconds, runner.name, device, runner.precision)
    return Loaded(config, tokenizer, runner, getattr(config, "_commit_hash", None) or spec.revision)


def _load_backend(choice: Choice, files: ModelFiles, device: str) -> Backend:
    try:
        return BACKENDS[choice.backend].load(files, device, choice.precision)
    except ImportError as error:
        raise SpecError(
            f"backend {choice.backend} cannot be imported ({error}); {BACKENDS[choice.backend].installed_by}"
        ) from error


def _locate(name: str) -> str | Path:
    """A directory, or the hub id as it is."""
    if name == "demo":
        return DEMO_MODEL
    path = Path(name).expanduser()
    if not path.is_dir():
        return name
    if not (path / "config.json").is_file():
        raise SpecError(f"{name} is no model: there is no config.json in it")
    if not any(path.glob("*.safetensors")):
        raise SpecError(f"{name} has no *.safetensors: save the model with safe_serialization=True")
    return path


def _cannot_load(spec: ScoreSpec, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if spec.model == "demo" or Path(spec.model).expanduser().is_dir():
        return f"cannot load the model in {spec.model}: {first_line}"
    return (
        f"cannot get model {spec.model} from the Hugging Face hub ({first_line}); "
        "use --model demo, or a local directory that holds the model"
    )


def _max_length(spec: ScoreSpec, config: Any, tokenizer: Any) -> int:
    """The limit sentence-transformers applies, but never more positions than the model has."""
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    positions -= first_position(config)
    if spec.max_length is None:
        return int(min(tokenizer.model_max_length, positions))
    if spec.max_length > positions:
        raise SpecError(
            f"max_length {spec.max_length} is over the {positions} positions model {spec.model} has"
        )
    return spec.max_length


def _activation(spec: ScoreSpec, config: Any) -> Callable[[Logits], Logits]:
    """What `CrossEncoder` would apply: the config's own function, else the sigmoid."""
    path = {"identity": "torch.nn.Identity", "sigmoid": "torch.nn.Sigmoid"}.get(spec.activation)
    if path is None:
        path = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    path = path or getattr(config, "sbert_ce_default_activation_function", None) or "torch.nn.Sigmoid"
    function = getattr(torch.nn, path.rpartition(".")[2], None) if path.startswith("torch.nn.") else None
    if function is None:
        raise SpecError(
            f"model {spec.model} names activation {path}, which is not in torch.nn; set --activation"
        )
    module: torch.nn.Module = function()

    def apply(logits: Logits) -> Logits:
        scores: Logits = module(torch.from_numpy(logits)).numpy()
        return scores

    return apply
