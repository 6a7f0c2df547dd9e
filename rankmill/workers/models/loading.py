"""Loads a model by its name, as an object that turns text into scores. `rankmill.workers.engine.proving`
checks the scores.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rankmill.jobs.cache import cache_folder, strangers
from rankmill.jobs.contract.errors import RankmillError, SpecError, WorkerError
from rankmill.jobs.contract.home import model_folder
from rankmill.jobs.contract.proof import Proof
from rankmill.jobs.contract.schema import Inputs
from rankmill.jobs.contract.spec import ScoreSpec, choose_output
from rankmill.jobs.system import system
from rankmill.workers.backends.alone import Alone
from rankmill.workers.backends.auto import BackendChoice, backends, choose_backend
from rankmill.workers.backends.base import Backend, DeviceLost, Logits, ModelFiles, OutOfMemory, is_panic
from rankmill.workers.backends.families import first_position
from rankmill.workers.backends.speed import Combination
from rankmill.workers.models.activation import Activation, activation
from rankmill.workers.models.description import Description, describe
from rankmill.workers.models.encoder import TextEncoder
from rankmill.workers.models.fast_texts import FastTexts
from rankmill.workers.models.prompts import answers, tokenizer_for
from rankmill.workers.models.sources import ModelCopies, find_source, is_path
from rankmill.workers.models.tokenizer import ShortPassages, Tokenize, Windows

logger = logging.getLogger(__name__)


@dataclass
class LastProbes:
    """When a model's probes (pairs with known scores) were last right, and whether a batch has failed since
    then.

    All specs of the model share this object, so that the probes are scored once for all of them.
    """

    at: float = field(default_factory=lambda: system.monotonic())  # noqa: PLW0108 -- a simulation replaces it
    errors_since: bool = False


@dataclass(frozen=True)
class Model:
    """A model that is ready to score: it turns texts into ids, ids into logits, and logits into scores.

    ``int8_gain`` is the speed of int8 here, divided by that of the model's precision; ``None`` if unknown.
    """

    name: str
    tokenizer: Tokenize
    backend: Backend
    activation: Activation
    revision: str | None
    int8_gain: float | None = None
    short_passages: ShortPassages | None = None
    """Cuts passages to the spec's ``max_passage_tokens``; ``None`` if the spec does not set it."""
    windows: Windows | None = None
    """Cuts long passages into windows; ``None`` if long passages are truncated or refused."""
    refused_over: int | None = None
    """A row with more tokens than this gets an error instead of a score. ``None`` if longer rows are cut or
    split.
    """
    labels: tuple[str, ...] = ()
    """Names of the outputs, if each output is a score; scores are then ``[rows, labels]``. Empty if a row has
    one score; scores are then ``[rows]``.
    """
    proof: Proof | None = None
    """The result of comparing the model's scores with those of transformers; ``None`` if they were not
    compared.
    """
    kind: str | None = None
    """A text that names everything on which the bits of a deterministic score depend, such as the CPU and
    versions of packages. ``None`` unless the spec is deterministic.
    """
    prove_again: Callable[[], Proof] | None = None
    """Scores the probes (the pairs of the proof) again, and returns a new proof of the model's scores."""
    prove_batch: Callable[[int, int], Proof | None] | None = None
    """Gets numbers of rows and of padded tokens. Compares the scores that the model makes in batches of this
    size, or somewhat larger, with transformers' scores. Returns a new proof, or ``None`` if batches of this
    size were compared before.
    """
    last_probes: LastProbes = field(default_factory=LastProbes)
    inputs: Inputs = "pairs"
    averages: bool = False
    """Whether a row's score is the mean of its windows' scores, instead of the best of them."""
    encoder: TextEncoder | None = None
    """Answers rows that ask for tokens instead of scores; ``None`` if rows ask for scores."""
    lock: threading.RLock = field(default_factory=system.RLock, compare=False)
    """A thread must hold this lock while it tokenizes for this model."""

    @property
    def texts(self) -> FastTexts | None:
        return self.tokenizer.texts

    def no_scores(self, rows: int) -> Logits:
        shape = (rows, len(self.labels)) if self.labels else (rows,)
        return np.full(shape, np.nan, np.float32)


@dataclass(frozen=True)
class Loaded:
    """Tokenizer and weights of a model, which many specs share.

    Attributes
    ----------
    about, backend, revision, int8_gain
        The model's description, its weights, its commit or digest, and ``int8_gain`` as in `Model`.
    held
        Keeps an extension's copy of the model on this host.
    source
        Where the model's files are.
    copies
        Digests of the cached files that were loaded instead of the model's.
    proof, prove_again, prove_batch, last_probes
        As in `Model`.
    check_spec
        Compares tokens with those of transformers, if a spec has options that change tokens.
    """

    about: Description
    backend: Backend
    revision: str | None
    int8_gain: float | None = None
    held: object = None
    source: str | Path = ""
    copies: tuple[str, ...] = ()
    proof: Proof | None = None
    prove_again: Callable[[], Proof] | None = None
    prove_batch: Callable[[int, int], Proof | None] | None = None
    last_probes: LastProbes = field(default_factory=LastProbes)
    check_spec: Callable[[ScoreSpec, Model], None] = lambda spec, model: None

    @property
    def kind(self) -> str | None:
        return self.backend.kind if isinstance(self.backend, Alone) else None

    def model(self, spec: ScoreSpec) -> Model:
        """Make the model with the length, activation, prompt and output of `spec`.

        Raises
        ------
        SpecError
            The model does not support an option of `spec`, or its tokens differ from transformers'.
        """
        description = self.about
        with one_line(spec), description.lock:
            longest = find_max_length(spec, description)
            refuses = spec.long == "refuse"
            tokenizer = tokenizer_for(spec, description, ANY_LENGTH if refuses else longest)
            scores, whole = _scores(spec, description), description.tokenizer
            most, splits = spec.max_passage_tokens, spec.long.startswith("split")
            model = Model(
                name=spec.model,
                tokenizer=tokenizer,
                backend=self.backend,
                activation=_row_by_row(scores) if self.kind else scores,
                revision=self.revision,
                int8_gain=self.int8_gain,
                short_passages=None if most is None else ShortPassages(whole, most),
                windows=Windows(whole, tokenizer, spec.long_stride) if splits else None,
                refused_over=longest if refuses else None,
                labels=description.labels if spec.all_labels and len(description.labels) > 1 else (),
                proof=self.proof,
                kind=self.kind,
                prove_again=self.prove_again,
                prove_batch=self.prove_batch,
                last_probes=self.last_probes,
                inputs=spec.inputs,
                averages=spec.long == "split-mean",
                encoder=TextEncoder(whole, longest, description.labels) if spec.inputs == "tokens" else None,
                lock=description.lock,
            )
            self.check_spec(spec, model)
            return model


def load_model(spec: ScoreSpec, device: str, backend: str = "auto", cache_dir: str = "auto") -> Model:
    """Load a model for one spec; the parameters are as in `load`."""
    return load(spec, device, backend, cache_dir).model(spec)


def load(
    spec: ScoreSpec,
    device: str,
    backend: str,
    cache_dir: str,
    copies: ModelCopies | None = None,
    without: Collection[Combination] = (),
) -> Loaded:
    """Load tokenizer and weights of a model.

    Parameters
    ----------
    spec
        The model and its options.
    device
        ``cpu``, ``cuda`` or ``mps``.
    backend
        ``auto``, or a key of `rankmill.workers.backends.auto.backends`.
    cache_dir
        Folder for files that are derived from models, or ``auto``.
    copies
        This host's copies of models that extensions know by name.
    without
        Backends and precisions that are not to be used.

    Raises
    ------
    SpecError
        The model does not exist, is not a cross-encoder, has no safetensors or is damaged, or it cannot run
        with the requested options or backend.
    WorkerError
        Another worker may be able to load the model: for example, its directory does not exist on this host.
    MemoryError, OutOfMemory, DeviceLost
        The memory does not suffice, or the device failed.
    """
    started = system.monotonic()
    with one_line(spec):
        cache = cache_folder(cache_dir)
        if why := strangers(cache):
            raise WorkerError(why)
        located = find_source(spec, copies, cache)
        source, revision = located.files, located.revision
        description = describe(source, revision, cache, located.check_unchanged)
        _scores(spec, description)  # raises errors of the spec before the weights are read
        texts = tokenizer_for(spec, description, find_max_length(spec, description)).texts
        # The fast tokenizer is proven while the weights load, so that a GPU waits less for tokens.
        if device != "cpu" and texts:
            texts.begin_proof()
        answer_ids = answers(spec, description) if description.layout.task == "causal" else None
        files = ModelFiles(
            source,
            revision,
            description.config,
            cache,
            description.layout,
            answer_ids,
            located.check_unchanged,
            alone=spec.deterministic,
        )
        choice = choose_backend(
            backend, spec.precision, description.config, device, cache, plain=description.plain,
            without=without, alone=spec.deterministic,
        )  # fmt: skip
        runner = _load_backend(choice, files, device)
        located.check_unchanged()
    if copies:
        copies.make_room()
    seconds = system.monotonic() - started
    logger.info("loaded %s in %.1f s: %s, %s, %s", spec.model, seconds, runner.name, device, runner.precision)
    kept = (description.copy, *files.copies)
    return Loaded(description, runner, revision, choice.int8_gain, located.held, source, kept)


def _scores(spec: ScoreSpec, description: Description) -> Activation:
    """Return the function that turns logits into the scores that a spec asks for: ``[rows]``, or ``[rows,
    labels]`` for all labels.
    """
    if spec.inputs == "tokens":
        return lambda logits: logits  # rows that ask for tokens have no scores
    chosen = None if spec.all_labels else choose_output(spec.label, description.labels, spec.model)
    saved = description.layout.activation
    if saved is None and spec.inputs != "pairs":
        saved = "torch.nn.Identity"
    apart = getattr(description.config, "problem_type", None) == "multi_label_classification"
    wanted = "sigmoid" if apart and spec.activation == "probability" else spec.activation
    function = activation(wanted, saved, spec.model, len(description.labels))
    return function if chosen is None else lambda logits: np.ascontiguousarray(function(logits)[:, chosen])


def _row_by_row(function: Activation) -> Activation:
    """Make a function that applies `function` to one row at a time, so that no bit of a row's score depends
    on other rows.
    """
    return lambda logits: np.concatenate([function(logits[row : row + 1]) for row in range(len(logits))])


ANY_LENGTH = 1 << 24
"""The limit on a pair's tokens if a model sets none; no pair is so long."""


class CannotConvert(SpecError):
    """A backend cannot convert a model to its own form, or cannot run the result.

    ``combination`` is the backend and precision.
    """

    def __init__(self, combination: Combination, reason: str) -> None:
        super().__init__(reason)
        self.combination = combination


def _load_backend(choice: BackendChoice, files: ModelFiles, device: str) -> Backend:
    kind = backends()[choice.backend]
    try:
        loaded = kind.load(files, device, choice.precision)
        return Alone(loaded, kind) if files.alone else loaded
    except Exception as error:
        passed = RankmillError, OutOfMemory, DeviceLost, OSError, MemoryError
        if choice.backend == "torch" or isinstance(error, passed):
            raise
        reason = " ".join(str(error).split())[:_LONGEST]
        raise CannotConvert(
            (choice.backend, choice.precision),
            f"backend {choice.backend} cannot run the model in {files.source}: {reason}; use --backend torch",
        ) from error


@contextmanager
def one_line(spec: ScoreSpec) -> Iterator[None]:
    """Turn errors of other libraries into a `SpecError` of one line.

    Errors of rankmill, of memory and of the device pass unchanged.
    """
    try:
        yield
    except (RankmillError, OutOfMemory, DeviceLost, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise SpecError(_cannot_load(spec, error)) from error


def _cannot_load(spec: ScoreSpec, error: BaseException) -> str:
    text = " ".join(str(error).split())[:_LONGEST] or "no reason given"
    reason = text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
    if spec.model == "demo" or is_path(spec.model) or model_folder(spec.model):
        return f"cannot load the model in {spec.model}: {reason}"
    if isinstance(error, OSError):
        return (
            f"cannot get model {spec.model} from the Hugging Face hub ({reason}); "
            "use --model demo, or a local directory that holds the model"
        )
    return f"cannot load model {spec.model}: {reason}"


_LONGEST = 300
"""An error of another library is shown with at most this many characters; the rest is cut off."""


def find_max_length(spec: ScoreSpec, description: Description) -> int:
    """Return the limit on a pair's tokens: the spec's, or else the model's own, or else `ANY_LENGTH`.

    The result is never more than the model's number of positions.

    Raises
    ------
    SpecError
        The spec's limit is more than the number of positions, or the model's scores depend on the length of
        other rows.
    """
    config = description.config
    positions = getattr(config, "max_position_embeddings", None) or 0
    positions = positions - first_position(config) if positions > 0 else ANY_LENGTH  # XLNet says -1
    own = description.layout.max_length or description.tokenizer.model_max_length
    longest = int(min(own, positions, ANY_LENGTH)) if spec.max_length is None else spec.max_length
    if longest > positions:
        raise SpecError(
            f"max_length {longest} is more than the {positions} positions of model {spec.model}",
            option="max_length",
        )
    if longest > (alike := _alike_positions(config)):
        raise SpecError(
            f"if a row has more than {alike} tokens, model {spec.model} scores all rows of its batch "
            f"differently (longrope): use --max-length {alike}",
            option="max_length",
        )
    return longest


def _alike_positions(config: Any) -> int:
    """Return the number of tokens up to which a row's score does not depend on the other rows of its batch.

    With positions of the type ``longrope``, transformers chooses between two sets of angles for a whole
    batch, by the longest row.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    each = [ropes, *ropes.values()]  # some models have parameters for each type of layer
    return min(
        (
            rope["original_max_position_embeddings"]
            for rope in each
            if isinstance(rope, dict) and rope.get("rope_type") == "longrope"
        ),
        default=ANY_LENGTH,
    )
