"""Checks a model's scores before a worker serves them, and stores the result in this host's cache.

The worker's logits for some pairs, the probes (`probing`), are compared with those of transformers' model
(`models/reference.py`). The rows of a batch can share a forward in several ways, for example padded to one
length (`Way`). If the logits are wrong in one way, the next way is tried. In the last way, only rows of equal
lengths share a forward. A deterministic model has a single way, in which each row has a forward of its own.
If the logits are wrong in all ways, another backend or precision is tried.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from rankmill.jobs.cache import cache_folder, lock, read_json, strangers
from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.home import shipped
from rankmill.jobs.contract.proof import Proof, Way
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS, cpu_flags
from rankmill.jobs.runtime.limits import free_memory
from rankmill.jobs.system import system
from rankmill.workers.backends.auto import backends
from rankmill.workers.backends.base import Logits, OutOfMemory, is_rounded
from rankmill.workers.backends.speed import Combination
from rankmill.workers.engine.probing import Probed, tokens_of
from rankmill.workers.engine.proof_time import ProofTime
from rankmill.workers.engine.spec_check import SpecCheck
from rankmill.workers.host.device import device_name, forced_kernels, threads
from rankmill.workers.host.disk_cache import digest, try_to_keep, version
from rankmill.workers.host.model_file import checkpoint
from rankmill.workers.models.loading import CannotConvert, Loaded, find_max_length, load, one_line
from rankmill.workers.models.probes import SCORED, over_the_limit, scored_length
from rankmill.workers.models.sources import ModelCopies

_FLOOR, _PART = 1e-4, 1e-5
"""In fp32, a worker's logits may always differ from transformers' by `_FLOOR`, or by `_PART` times the
largest logit if that is more. The same holds in other precisions if the model is too large to be run in fp32
for comparison.
"""

_SCORE_PART = 1e-6
"""Scores made from the same logits may differ from transformers' by at most this share of the largest score.
A largest score below 1 counts as 1.
"""

_TIMES = 2.0
"""A worker's logits may differ from transformers' logits in fp32 by this many times the error that
transformers itself has in the worker's precision.
"""

_LARGEST = 4 << 30
"""For comparison, transformers' model is run in fp32 on the CPU. If the model's weight files have more bytes
than this, it is run on the worker's device in the worker's precision instead.
"""

_CHOSEN = 16
"""At most this many of a model's outputs are checked one by one, by their names and by their numbers."""

_LONGEST = 160
"""The error of a probe (a test pair) is cut to this many characters in messages."""

_BATCH_SECONDS = 0.5
"""A model's scores are checked at loading in batches of up to about this many seconds. Larger batches are
checked before the first chunk that needs them.
"""

_LARGE_BATCHES = 4
"""Number of batches that `Probed.repeated` scores."""

_FACTOR, _ROWS = 4, 1024
"""A model's scores are checked at loading in batches of at most `_ROWS` rows. These batches have at most
`_FACTOR` times as many padded tokens as `TOKEN_BUDGETS` has for the device.
"""

_BELIEVED_SECONDS = 3600.0
"""A proof of wrong scores is used for this many seconds. Then the scores are measured again, because the
device may have been repaired or replaced.
"""

DEMO_FIGURES = shipped("examples", "demo-model.json")
"""File with transformers' results for the demo model (`Shipped`). With it, the first proof of this model's
scores needs neither transformers nor torch.
"""

logger = logging.getLogger(__name__)


class Own(BaseModel, frozen=True, extra="forbid"):
    """Results of transformers for the probes, which are the pairs that check a worker's scores.

    Attributes
    ----------
    logits
        Logits ``[probes, outputs]``.
    scores
        Scores ``[probes, outputs]`` for each activation that a spec may name. The model's own activation is
        missing if torch lacks this activation.
    labels
        Names of the outputs.
    tokens
        Digests of the token ids of the scored probes, and then of the probes that are longer than the model's
        limit.
    longest
        Tokens of the longest scored probe.
    drift
        Largest change of the first probe's logits if it is scored again after all other probes.
    """

    logits: tuple[tuple[float, ...], ...]
    scores: dict[str, tuple[tuple[float, ...], ...]]
    labels: tuple[str, ...]
    tokens: tuple[str, ...]
    longest: int
    drift: float


class Shipped(BaseModel, frozen=True, extra="forbid"):
    """Results of transformers for the demo model, and their error in bf16 on a CPU.

    ``of`` is the value of `Proving.of_model` for which the results were made.
    """

    of: str
    own: Own
    bf16: float


class Kept(BaseModel, frozen=True, extra="forbid"):
    """A file in this host's cache: the proof of a model's scores, and what it depends on."""

    about: dict[str, Any]
    proof: Proof
    own: Own


def load_proven(
    spec: ScoreSpec,
    device: str,
    backend: str,
    cache_dir: str,
    copies: ModelCopies | None = None,
    on_proof: Callable[[ProofTime], None] = lambda _: None,
) -> Loaded:
    """Load a model and prove its scores: compare them with those of transformers, or use a cached proof.

    A cached proof comes from an earlier worker of this host. Backends, precisions and each `Way` (how the
    rows of a batch share a forward) are tried one after the other, until the scores are right.

    Parameters
    ----------
    spec, device, backend, cache_dir, copies
        As in `rankmill.workers.models.loading.load`.
    on_proof
        Called with an estimate of the time for a new proof: first when the model is loaded, and again when
        the estimate changes.

    Raises
    ------
    SpecError
        The model cannot be loaded on any worker, or transformers' logits are not numbers.
    WorkerError
        This worker cannot load the model, but another may. Or the scores were wrong in every attempt; the
        message then has the figures of all attempts.
    MemoryError, OutOfMemory, DeviceLost
        The memory does not suffice, or the device failed.
    """
    failed: list[Proof] = []
    without: set[Combination] = set()
    while True:
        try:
            loaded = load(spec, device, backend, cache_dir, copies, without)
        except CannotConvert as error:
            if backend != "auto":
                raise
            logger.warning("%s; another backend is tried", error)
            without.add(error.combination)
            continue
        except WorkerError:
            if not failed:
                raise
            tries = "; ".join(map(str, failed))
            raise WorkerError(f"model {spec.model} would not get its own scores: {tries}") from None
        with one_line(spec):
            proving = Proving(spec, loaded, cache_folder(cache_dir), on_proof)
            for way in proving.ways:
                proof = proving.proof(way)
                if proof.holds:
                    if failed:
                        logger.warning("%s is scored by another way: %s", spec.model, proof)
                    proving.take(way)
                    return replace(
                        loaded,
                        proof=proof,
                        prove_again=partial(proving.again, way),
                        prove_batch=partial(proving.batch, way),
                        check_spec=SpecCheck(loaded, spec.prompt_template, proving.folder),
                    )
                logger.warning("%s would not get its own scores: %s", spec.model, proof)
                failed.append(proof)
        without.add((loaded.backend.name, loaded.backend.precision.partition(" ")[0]))


class Proving:
    """Checks whether a loaded model gets the same scores as in transformers.

    Parameters
    ----------
    spec
        Names the model, the kind of its rows, and the prompt template if the model's files have none.
    loaded
        The loaded model of the spec.
    folder
        The cache folder.
    on_proof
        Called with an estimate of the time for a new proof: first when this object is made, and again when
        the estimate changes.
    """

    def __init__(
        self,
        spec: ScoreSpec,
        loaded: Loaded,
        folder: Path,
        on_proof: Callable[[ProofTime], None] = lambda _: None,
    ) -> None:
        self._time = ProofTime(on_proof)
        on_proof(self._time)
        self._spec = ScoreSpec(
            model=spec.model,
            prompt_template=spec.prompt_template,
            activation="identity",
            all_labels=True,
            inputs=spec.inputs,
        )
        self._loaded, self.folder = loaded, folder / "proofs"
        self._shares_prefixes = loaded.backend.shares_prefixes
        self.ways: tuple[Way, ...] = ("padded", "equal")
        if loaded.backend.shares_prefixes:
            self.ways = ("shared", *self.ways)
        if loaded.backend.packs:
            self.ways = ("packed", *self.ways)
        if loaded.kind:
            self.ways = ("alone",)
        self._limit = find_max_length(self._spec, loaded.about)
        self._length = min(self._limit, scored_length(loaded.about.config))
        self._model = {
            "model": loaded.revision,
            "template": spec.prompt_template,
            "inputs": spec.inputs,
            "length": self._length,
            "probes": digest((SCORED, over_the_limit(self._limit))),
        }
        self._known: tuple[Own, float, Literal["exact", "own"]] | None = None
        self._proof: Proof | None = None
        self._sizes: tuple[int, ...] = ()
        """Rows and tokens of the largest batches that a cached proof includes. The proof is not used: it says
        that the scores are wrong, and is too old.
        """

    def take(self, way: Way) -> None:
        self._loaded.backend.packs = way == "packed"
        self._loaded.backend.shares_prefixes = self._shares_prefixes and way in ("packed", "shared")

    def proof(self, way: Way) -> Proof:
        """Return the proof of the model's scores for one `Way`: the proof in this host's cache, or a new one.

        While one worker makes a proof, other workers of this host wait for it.
        """
        self._sizes = ()
        if not self._read(way):
            with ExitStack() as stack:
                with suppress(OSError):  # without a lock, each worker makes a proof for itself
                    if held := lock(self._file(way).with_suffix(".lock")):
                        stack.callback(held.close)
                if not self._read(way):
                    self._keep(way, self.measured(way, *self._sizes))
        assert self._proof
        return self._proof

    def again(self, way: Way) -> Proof:
        """Score the probes (pairs with known scores) again, and return a new proof of the model's scores.

        If the scores are wrong now, delete the proof in this host's cache.
        """
        assert self._proof
        self._time = ProofTime()  # without `on_proof`, because nobody waits for this proof
        with self._loaded.about.lock:
            proof = self.measured(way, rows=self._proof.rows, tokens=self._proof.tokens)
        if not proof.holds:
            with suppress(OSError):
                self._file(way).unlink(missing_ok=True)
        return proof

    def batch(self, way: Way, rows: int, tokens: int) -> Proof | None:
        """Check the model's scores in batches of `rows` rows and `tokens` padded tokens, or somewhat more.

        Returns the extended proof, or ``None`` if the proof included such batches already. The proof is
        stored in this host's cache even if the scores are wrong, so that later workers do not use this `Way`
        (how the rows of a batch share a forward).
        """
        assert self._proof
        if rows <= self._proof.rows and tokens <= self._proof.tokens:
            return None
        rows, tokens = max(self._proof.rows, rows), max(self._proof.tokens, tokens)
        sizes = _rounded_up(rows), _rounded_up(tokens)
        with self._loaded.about.lock:
            probed = self._probed(way)
        try:
            wrong, difference = self._repeated(probed, *sizes)
        except OutOfMemory:
            sizes = rows, tokens
            wrong, difference = self._repeated(probed, *sizes)
        changed = {"rows": sizes[0], "tokens": sizes[1], "wrong": wrong}
        largest = {"difference": max(difference, self._proof.difference)}
        self._keep(way, self._proof.model_copy(update=changed | largest))
        return self._proof

    def _file(self, way: Way) -> Path:
        return self.folder / f"{digest(sorted(self._about(way).items()))}.json"

    def _about(self, way: Way) -> dict[str, Any]:
        """Return everything on which the proof of the model's scores depends, such as the versions of
        packages.
        """
        backend = self._loaded.backend
        return {
            **self._model,
            **_of_device(backend.device),
            "way": way,
            "backend": backend.name,
            "precision": backend.precision,
            "flags": digest(sorted(cpu_flags())),
            "forced": forced_kernels(),
            "copies": [*self._loaded.copies],
            "release": _release(),
            "versions": _versions(backend.name, backend.precision),
            "kind": self._loaded.kind,
        }

    def _read(self, way: Way) -> bool:
        """Read the proof of the model's scores from this host's cache, and return whether it is used.

        A proof is used only if everything on which it depends (`_about`) is still the same. A proof that was
        made without transformers' model in fp32 is used only while the model is too large for that. A proof
        of wrong scores is used only for an hour.
        """
        if strangers(self.folder, self.folder.parent):
            return False
        try:
            kept = Kept.model_validate(read_json(self._file(way)))
        except ValidationError:  # no proof is kept, or it is damaged
            return False
        inputs = json.loads(json.dumps(self._about(way)))
        if kept.about != inputs or (kept.proof.reference == "own" and not self._is_large()):
            return False
        self._proof, self._known = kept.proof, (kept.own, kept.proof.own, kept.proof.reference)
        if kept.proof.holds:
            return True
        self._sizes = kept.proof.rows, kept.proof.tokens
        with suppress(OSError):
            return 0 <= system.now() - self._file(way).stat().st_mtime < _BELIEVED_SECONDS
        return False

    def _keep(self, way: Way, proof: Proof) -> None:
        self._proof = proof
        assert self._known
        if self._loaded.revision:
            kept = Kept(about=self._about(way), proof=proof, own=self._known[0])
            try_to_keep(self._file(way), kept.model_dump(), f"the proof of {self._spec.model}")

    def _probed(self, way: Way) -> Probed:
        self.take(way)
        return Probed(self._loaded.model(self._spec.model_copy(update={"max_length": self._length})), way)

    def measured(self, way: Way, rows: int | None = None, tokens: int | None = None) -> Proof:
        """Make a new proof of the model's scores, whatever this host's cache has.

        Parameters
        ----------
        way
            The `Way` in which the rows of a batch are computed together, such as ``padded``.
        rows, tokens
            Sizes of the largest batches that the proof includes; if memory is short, they become smaller. By
            default, the speed of the model decides the sizes.
        """
        began, backend = system.monotonic(), self._loaded.backend
        own, off, reference = self._known = self._known or self._reference()
        theirs = np.array(own.logits, np.float32)
        if not np.isfinite(theirs).all(axis=1).any():
            raise SpecError(f"model {self._spec.model}: its output is not a number: its weights are damaged")
        bound = _TIMES * off
        if backend.precision == "fp32" or reference == "own":
            bound = max(bound, _FLOOR, _PART * _largest(theirs))
        probed, at = self._probed(way), system.monotonic()
        companies = probed.companies(self._time, then=_LARGE_BATCHES * _BATCH_SECONDS)
        if rows is None or tokens is None:
            rows, tokens = self._first_sizes(probed, system.monotonic() - at)
        wrong = self._other_bits(companies) or self._wrong(own, probed, theirs, bound)
        difference = max(_largest(ours - theirs) for ours in companies)
        while not wrong and difference <= bound:
            try:
                wrong, repeated = self._repeated(probed, rows, tokens, bound)
                difference = max(difference, repeated)
                break
            except OutOfMemory:
                if rows == tokens == 1:
                    raise
                rows, tokens = max(rows // 2, 1), max(tokens // 2, 1)
        proof = Proof(
            digest=self._loaded.revision,
            backend=backend.name,
            precision=backend.precision,
            **_of_device(backend.device),
            release=_release(),
            versions=_versions(backend.name, backend.precision),
            way=way,
            reference=reference,
            probes=len(SCORED),
            longest=own.longest,
            rows=rows,
            tokens=tokens,
            difference=difference,
            company=max(_largest(ours - companies[0]) for ours in companies),
            own=off,
            bound=bound,
            wrong=wrong,
        )
        seconds = system.monotonic() - began
        logger.info("measured the scores of %s in %.1f s: %s", self._spec.model, seconds, proof)
        return proof

    def _first_sizes(self, probed: Probed, seconds: float) -> tuple[int, int]:
        """Choose the largest batches that are checked while the model is loaded: rows and padded tokens.

        A slow model gets smaller batches. In `seconds`, each probe (a pair that checks scores) was scored at
        least three times.
        """
        speed = 3 * probed.size / max(seconds, 1e-6)
        most = _FACTOR * TOKEN_BUDGETS[self._loaded.backend.device.partition(":")[0]]
        tokens = int(min(most, max(_BATCH_SECONDS * speed, 1)))
        return min(_ROWS, max(tokens // probed.shortest, 1)), tokens

    def _repeated(
        self, probed: Probed, rows: int, tokens: int, bound: float | None = None
    ) -> tuple[str | None, float]:
        """Compare the logits of large batches of probes with transformers'.

        Returns what is wrong with the first batch that fails (or ``None``), and the largest difference in the
        batches before it.

        Parameters
        ----------
        probed
            Scores the probes.
        rows, tokens
            Sizes of the batches.
        bound
            The largest allowed difference; by default the bound of the proof.
        """
        assert self._known
        bound = self._proof.bound if bound is None and self._proof else bound
        assert bound is not None
        theirs, most = np.array(self._known[0].logits, np.float32), 0.0
        for places, ours in probed.repeated(rows, tokens):
            expected = theirs[places]
            lost = int((np.isfinite(expected).all(axis=1) & ~np.isfinite(ours).all(axis=1)).sum())
            difference = _largest(ours - expected)
            if lost or difference > bound:
                fault = f"{lost} rows without a score" if lost else f"scores that differ by {difference:.2g}"
                return f"a batch of {len(places)} rows has {fault}", most
            most = max(most, difference)
        return None, most

    def _other_bits(self, companies: list[Logits]) -> str | None:
        """Return an error message if the model must be deterministic, but its logits for a probe differ.

        Otherwise return ``None``. `companies` has the logits from scoring the probes several times.
        """
        first, *others = companies
        if self._loaded.kind is None or all(_same_bits(first, logits) for logits in others):
            return None
        return "it must be deterministic, but a pair by itself does not get the same bits each time"

    def _wrong(self, own: Own, probed: Probed, theirs: Logits, bound: float) -> str | None:
        """Return what is wrong with a model apart from its logits, such as other token ids, or ``None``."""
        scored = len(SCORED)
        if probed.tokens != list(own.tokens[:scored]):
            place = next(n for n in range(scored) if probed.tokens[n] != own.tokens[n])
            return f"probe {place} gets other tokens than transformers gives it"
        if own.drift > bound:
            return f"transformers' own output for a pair changes by {own.drift:.2g} after other pairs"
        lost = [row for row in probed.errors if np.isfinite(theirs[row]).all()]
        if lost:
            return f"probe {lost[0]} has no score: {probed.errors[lost[0]][:_LONGEST]}"
        whole = self._loaded.model(self._spec)
        if tokens_of(whole, over_the_limit(self._limit)) != list(own.tokens[scored:]):
            return f"pairs over the limit of {self._limit} tokens get other tokens than from transformers"
        return self._other_scores(own, theirs)

    def _other_scores(self, own: Own, theirs: Logits) -> str | None:
        """Compare the scores that the worker and transformers make from the same logits.

        Returns an error message for the first difference, or ``None`` if there is none. This compares the
        scores for the activations and the outputs that a spec may name.
        """
        several = len(own.labels) > 1
        logits = theirs if several else theirs[:, 0]
        for activation, (label, output) in product(own.scores, _choices(own.labels)):
            every = label is None and several
            spec = {"activation": activation, "label": label, "all_labels": every}
            with suppress(SpecError):  # no spec can ask for an activation that torch lacks
                model = self._loaded.model(self._spec.model_copy(update=spec))
                if model.labels != (own.labels if every else ()):
                    return f"its outputs are {', '.join(own.labels)}, in this order"
                ours = model.activation(logits).reshape(len(logits), -1)
                expected = np.array(own.scores[activation], np.float32)[:, output]
                lost = np.isfinite(expected) & ~np.isfinite(ours)
                if lost.any() or _largest(ours - expected) > _SCORE_PART * max(_largest(expected), 1):
                    of = f" of output {label}" if label else ""
                    return f"the same output has another score{of} (activation {activation})"
        return None

    def _reference(self) -> tuple[Own, float, Literal["exact", "own"]]:
        """Return transformers' results for the probes, their error, and the value of `Proof.reference`."""
        backend, large = self._loaded.backend, self._is_large()
        here = "" if large or backend.device != "cpu" else backend.precision
        if here in ("fp32", "bf16") and (figures := self._shipped()):
            return figures.own, figures.bf16 if here == "bf16" else 0.0, "exact"
        return *self.asked(large=large), "own" if large else "exact"

    def _shipped(self) -> Shipped | None:
        """Read transformers' results for the demo model from `DEMO_FIGURES`.

        Returns ``None`` for any other model, and if the results are missing or no longer valid.
        """
        if self._spec.model != "demo" or not DEMO_FIGURES.is_file():
            return None
        figures = Shipped.model_validate(read_json(DEMO_FIGURES))
        return figures if figures.of == self.of_model else None

    @property
    def of_model(self) -> str:
        """A digest of what transformers' results depend on, such as the model, its prompt template and the
        probes.
        """
        return digest(sorted(self._model.items()))

    def _is_large(self) -> bool:
        """Return whether the model is too large to be run in fp32 on the CPU, for comparison."""
        files = checkpoint(self._loaded.source, self._loaded.revision)
        size = sum(file.stat().st_size for file in files)
        return size > _LARGEST or size > free_memory() // 2

    def asked(self, *, large: bool) -> tuple[Own, float]:
        """Run transformers' model twice on the probes. Returns the results of the first run, and how far a
        logit of the second run is from them at most: the error of the worker's precision.

        - The first run is in fp32 on the CPU. A `large` model runs in the worker's precision on the worker's
          device, with bf16 in place of 8 or 4 bits.
        - The second run is in the worker's precision on the worker's device.

        In two cases, the second run would be the same as the first:

        - A model that is not `large`, on a worker with fp32 on the CPU: there is no second run, and the error
          is 0.
        - A `large` model in more than 8 bits: the second run pads each probe to the length of the first one.
        """
        # imported here, because it imports torch, which is not needed if the proof is in the cache
        from rankmill.workers.models.reference import ReferenceModel

        backend = self._loaded.backend
        rounds, rounding = is_rounded(backend.precision), backends()[backend.name].rounding
        model = ReferenceModel(self._spec, self._loaded.source, self._loaded.revision)
        try:
            if large:
                model.cast("bf16" if rounds else backend.precision, backend.device, rounding)
            tokens = [model.tokens(probe, self._length) for probe in SCORED]
            logits = self._theirs(model, tokens)
            first = next(row for row in tokens if row["input_ids"])
            over = [model.tokens(probe, self._limit)["input_ids"] for probe in over_the_limit(self._limit)]
            own = Own(
                logits=tuple(map(tuple, logits.tolist())),
                scores={
                    activation: tuple(map(tuple, values.tolist()))
                    for activation, values in model.scores(logits).items()
                },
                labels=tuple(model.labels(logits.shape[1])),
                tokens=tuple(digest(ids) for ids in [*(row["input_ids"] for row in tokens), *over]),
                longest=max(len(row["input_ids"]) for row in tokens),
                drift=_largest(model.logits([first])[0] - logits[tokens.index(first)]),
            )
            if not large and (backend.device, backend.precision) == ("cpu", "fp32"):
                return own, 0.0
            if large and not rounds:
                other_logits = self._theirs(model, tokens[1:], tokens[0])
            else:
                model.cast(backend.precision, backend.device, rounding)
                other_logits = self._theirs(model, tokens)[1:]
            return own, _largest(other_logits - logits[1:])
        finally:
            model.close()

    def _theirs(self, model: Any, tokens: list[dict[str, list[int]]], *beside: Any) -> Logits:
        """Compute transformers' logits ``[probes, outputs]``, with NaN for a probe without tokens.

        Each probe is computed by itself, or padded to the length of the probe `beside`.
        """
        places = [place for place, row in enumerate(tokens) if row["input_ids"]]
        costs = [sum(len(row["input_ids"]) for row in (tokens[place], *beside)) for place in places]
        computed = [model.logits([tokens[place]], *beside)[0] for place in self._time.each(places, costs)]
        logits = np.full((len(tokens), len(computed[0])), np.nan, np.float32)
        logits[places] = computed
        return logits


def _rounded_up(size: int) -> int:
    """Round the size of a batch up to a power of two, so that growing batches need few new checks."""
    return 1 << max(size - 1, 0).bit_length()


def _choices(labels: tuple[str, ...]) -> Iterator[tuple[str | None, slice]]:
    """Yield values for the label of a spec, each with the slice of a model's outputs that it selects.

    The first value is ``None``, for all outputs. The other values are names and numbers of up to `_CHOSEN`
    outputs.
    """
    yield None, slice(None)
    lower = [label.lower() for label in labels]
    for number in np.unique(np.linspace(0, len(labels) - 1, _CHOSEN).astype(int)).tolist():
        names = [labels[number]] if lower.count(lower[number]) == 1 else []
        names += [str(number)] if str(number) not in lower else []
        for name in names:
            yield name, slice(number, number + 1)


def _largest(values: Logits) -> float:
    """Return the largest absolute value of the finite numbers in an array; 0 if there are none."""
    magnitudes = np.abs(values[np.isfinite(values)])
    return float(magnitudes.max(initial=0.0))


def _same_bits(ours: Logits, theirs: Logits) -> bool:
    in_both = np.isfinite(ours) & np.isfinite(theirs)
    return bool((ours[in_both].view(np.uint32) == theirs[in_both].view(np.uint32)).all())


def _of_device(device: str) -> dict[str, str]:
    return {"device": device, "machine": f"{device_name(device)}, {threads()} threads"}


def _release() -> str:
    return version("rankmill")


def _versions(backend: str, precision: str) -> dict[str, str]:
    packages = backends()[backend].packages_of(precision)
    return {package: version(package) for package in ("torch", "transformers", "tokenizers", *packages)}
