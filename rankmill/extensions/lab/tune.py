"""Searches for the best settings, one setting after another. To compare two values, it measures both
in turn.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel

from rankmill import plugins
from rankmill.extensions.lab.agreement import Agreement, agreement
from rankmill.extensions.lab.bench import Bench, BenchFailed, BenchTimeout, Records, split_requests
from rankmill.extensions.lab.experiment import Value
from rankmill.extensions.lab.grid import label
from rankmill.jobs.contract.errors import EmbeddedError, RankmillError, RunFailed
from rankmill.jobs.contract.spec import Precision
from rankmill.jobs.runtime.hosts import TOKEN_BUDGETS
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.local.embedded import worker_environs
from rankmill.score.session import RunScores

Objective = Literal["throughput", "latency", "memory"]
Changes = Mapping[str, Value]
"""Changes to the initial settings of a tuning, by name."""

REFERENCE: Changes = {"backend": "torch", "precision": "fp32"}
"""Settings of the reference. Rankings with other backends and precisions must agree with the reference's."""

MAX_ROWS = 2000

_MIN_ROWS = 200
"""Minimum number of pairs in a sample, which is enough to judge most precisions.

Of 40 samples of MS MARCO with 4 queries of 50 rows, 37 kept bf16 at a threshold of 0.999, and 3 were
undecided.
"""
_ROUNDS = 3
_CLEAR = 1.5
"""Two combinations of settings are compared in rounds; each round measures both. No more rounds follow when
one combination is at least this many times as good as the other.
"""
_WARM_UP = 16
_REQUEST_SIZE = 20

_MARGIN = 1.02
"""A change of settings is kept only if it is better by more than this factor: 1.02 means 2%. Smaller gains
are noise.
"""

_FINALISTS = 3

_CHANCE = 1.5
"""Backends and precisions slower than the fastest by this factor are not measured again. This does not apply
if the objective is memory.
"""

_SAMPLE_SHARE = 1 / 30
"""Share of the tuning's time for scoring the sample with the `REFERENCE` settings. This share determines the
size of the sample.
"""

_LAST_SHARE = 1 / 4
"""Share of the tuning's time that is kept for comparing the best settings with the initial ones."""


class ReferenceScores(BaseModel):
    """The scores that the first pairs of the sample get with the `REFERENCE` settings. The more time the
    tuning has, the more pairs are scored.
    """

    scores: list[float]
    device: str


class PrecisionProbe(BaseModel):
    """The measurement of a backend and precision: seconds for the sample, and agreement with the reference
    scores.

    If the backend cannot run the precision here, ``reason`` says why. ``lost`` is the number of rows that
    have a reference score, but no score in this precision.
    """

    backend: str
    precision: str
    reason: str = ""
    lost: int = 0
    seconds: float = 0.0
    agreement: Agreement | None = None


class PairedCosts(BaseModel):
    """Costs of two combinations of settings, measured in turn; less is better.

    Attributes
    ----------
    first, second
        The costs in seconds or bytes, one for each round.
    reason
        Why a combination could not be measured; empty if both were measured.
    """

    first: list[float] = []
    second: list[float] = []
    reason: str = ""

    @property
    def gain(self) -> float:
        """How many times as good the second settings are as the first: the median of first cost / second
        cost. Without costs, this is 0.

        Do not divide the medians of the costs instead: speeds drift between rounds.
        """
        return float(np.median(np.divide(self.first, self.second))) if self.second else 0.0


class Trials:
    """Measures settings on this machine. Workers of the best settings stay alive for the next comparison.

    Parameters
    ----------
    base
        The initial settings; each measurement changes some of them.
    pairs
        The sample. `use` cuts it to the rows that were scored with the `REFERENCE` settings.
    objective
        What a cost is: the seconds of a bulk run (``throughput``), the p95 of the seconds of single requests
        (``latency``), or the bytes of peak memory (``memory``).
    timeout
        Seconds for all measurements, unless `until` sets another end.

    Attributes
    ----------
    pairs
        The sample.
    deadline
        The time (monotonic) after which nothing is measured.
    """

    def __init__(self, base: Settings, pairs: pa.Table, objective: Objective, timeout: float) -> None:
        self._base, self.pairs, self._objective = base, pairs, objective
        self.deadline = system.monotonic() + timeout
        self._live: dict[str, Bench] = {}

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_others(None)

    def until(self, deadline: float) -> None:
        """Let measurements fail with `BenchTimeout` from the time `deadline` (monotonic) on."""
        self.deadline = deadline
        for bench in self._live.values():
            bench.deadline = deadline

    def reference(self, seconds: float) -> ReferenceScores:
        """Score the first rows of the sample with the `REFERENCE` settings, for about `seconds`.

        At least `_MIN_ROWS` rows are scored, even if they take longer.
        """
        with self._bench(REFERENCE) as bench:
            few = self.pairs.slice(0, 2 * _WARM_UP)
            bench.warm_up(few)
            bench.bulk(few)  # not timed: the first batch of each shape is slow
            rows = max(_MIN_ROWS, int(seconds * len(few) / bench.bulk(few).seconds))
            scored = bench.bulk(self.pairs.slice(0, rows))
        if np.isnan(scored.scores).all():
            raise BenchFailed(f"no pair of the sample has a score with {label(REFERENCE)}")
        return ReferenceScores(scores=scored.scores.tolist(), device=scored.stats[0].device)

    def use(self, reference: ReferenceScores) -> None:
        self.pairs = self.pairs.slice(0, len(reference.scores))

    def probe(self, backend: str, precision: str, reference: ReferenceScores) -> PrecisionProbe:
        """Score the sample with a backend and precision, and compare the rankings with those of `reference`.
        The workers stay alive for the backend's other precisions.
        """
        place: dict[str, Any] = {"backend": backend, "precision": precision}
        workers: Changes = {"backend": backend}
        self.end_others(workers)
        try:
            scored = self.bulk(self.warm(workers, precision=precision), precision=precision)
        except BenchTimeout:
            raise
        except (RunFailed, BenchFailed, EmbeddedError) as error:
            # If the error is not `RunFailed`, workers have died or did not start. The next precision then
            # gets new workers.
            if not isinstance(error, RunFailed):
                self.end_others(None)
            return PrecisionProbe(**place, reason=str(error))
        lost = int(np.count_nonzero(np.isfinite(reference.scores) & ~np.isfinite(scored.scores)))
        agreed = rank_agreement(self.pairs, scored.scores, reference.scores)
        return PrecisionProbe(**place, lost=lost, seconds=scored.seconds, agreement=agreed)

    def compare(self, first: Changes, second: Changes) -> PairedCosts:
        """Measure two combinations of settings in turn, so that other load on the machine affects both.

        If the time limit ends the measurements, the costs of the complete rounds are returned. Raises
        `BenchTimeout` if no round is complete.
        """
        costs_of_both = PairedCosts()
        try:
            benches = [self.warm(first), self.warm(second)]
            for number in range(_ROUNDS):
                costs = {place: self._cost(benches[place]) for place in ((0, 1), (1, 0))[number % 2]}
                costs_of_both.first.append(costs[0])
                costs_of_both.second.append(costs[1])
                if self._objective == "memory" or not 1 / _CLEAR < costs_of_both.gain < _CLEAR:
                    break
        except BenchTimeout:
            if not costs_of_both.second:
                raise
        except (BenchFailed, RunFailed, EmbeddedError) as error:
            return PairedCosts(reason=str(error))
        return costs_of_both

    def warm(self, changes: Changes, **spec: Any) -> Bench:
        """Return workers with these settings, after a warm-up with `spec`. If no such workers are alive, they
        are started.

        Raises
        ------
        BenchFailed, RunFailed, EmbeddedError
            The workers cannot be started or cannot score.
        """
        name = _name(changes)
        if name not in self._live:
            self._live[name] = self._bench(changes).__enter__()
        self._live[name].warm_up(self.pairs.slice(0, _WARM_UP), **spec)
        return self._live[name]

    def bulk(self, bench: Bench, **spec: Any) -> RunScores:
        """Score the sample once for each worker; returns the scores of one pass, and the mean seconds of a
        pass.

        Do not share one pass among the workers: its chunks would be too small to sort by length.
        """
        scored = bench.bulk(pa.concat_tables([self.pairs] * bench.workers), **spec)
        once = scored.scores[: len(self.pairs)]
        return dataclasses.replace(scored, scores=once, seconds=scored.seconds / bench.workers)

    def end_others(self, winner: Changes | None) -> None:
        for name in list(self._live):
            if winner is None or name != _name(winner):
                self._live.pop(name).__exit__(None, None, None)

    def _bench(self, changes: Changes) -> Bench:
        settings = self._base.changed(changes)
        if len(worker_environs(settings)) > 1:  # let each worker score one sample
            most = len(self.pairs) if settings.chunk_size == "auto" else settings.chunk_size
            share = {"chunk_size": min(most, len(self.pairs)), "claim_ahead": 1}
            settings = settings.model_copy(update=share)
        return Bench(settings, self.deadline - system.monotonic())

    def _cost(self, bench: Bench) -> float:
        if self._objective == "latency":
            requests = split_requests(self.pairs, max(len(self.pairs) // _REQUEST_SIZE, 5), _REQUEST_SIZE)
            return float(np.percentile([answer.seconds for answer in bench.requests(requests, 1)], 95))
        seconds = self.bulk(bench).seconds
        return seconds if self._objective == "throughput" else float(bench.peak_bytes)


def rank_agreement(
    pairs: pa.Table, scores: npt.NDArray[np.float32], reference: list[float]
) -> Agreement | None:
    """Compare how `scores` and `reference` rank the pairs of each query. If no query can be compared, all
    pairs are compared as if they belonged to one query. Returns ``None`` if all of `scores` or all of
    `reference` are equal.
    """
    expected = np.asarray(reference, np.float32)
    within_queries = agreement(pairs["query"].to_pylist(), scores, expected)
    return within_queries or agreement([""] * len(pairs), scores, expected)


def _name(changes: Changes) -> str:
    return json.dumps(changes, sort_keys=True)


RecordT = TypeVar("RecordT", bound=BaseModel)


class NothingWorks(RankmillError):
    """Raised if no backend and precision can score the sample here in time and with the required rank
    correlation.
    """


@dataclass
class Tuned:
    """The result of a tuning.

    Attributes
    ----------
    changes
        The best settings, as changes to the initial ones. If the initial settings turned out better, there
        are no changes. There is an exception: if ``auto`` might choose a backend or precision that has not
        passed the test of rankings, the changes are the backend and the precision.
    gain
        How many times as good the best settings are as the initial ones; ``None`` if this was not measured.
    story
        The steps of the tuning in words.
    """

    changes: dict[str, Any]
    gain: float | None = None
    story: list[str] = field(default_factory=list)


@dataclass
class Tuner:
    """Tunes the settings that are ``auto``; the others do not change.

    Parameters
    ----------
    base
        Settings to begin with.
    trials
        Makes the measurements.
    objective
        What to optimize.
    records
        Measurements of an interrupted tuning, which are not made again.
    budget
        Seconds for all new measurements. A measurement that would take longer is ended.
    min_spearman
        Rank correlation with the reference that a precision must reach.
    say
        Called with a line of text after each step.
    """

    base: Settings
    trials: Trials
    objective: Objective
    records: Records
    _: KW_ONLY
    budget: float
    min_spearman: float
    say: Callable[[str], None]
    _best: dict[str, Any] = field(default_factory=dict, init=False)
    _all_kept: bool = field(default=False, init=False)
    _story: list[str] = field(default_factory=list, init=False)

    def tune(self) -> Tuned:
        """Search for the best settings, until all candidates are tried or the time for the tuning (`budget`)
        is over.

        Raises
        ------
        NothingWorks
            No backend and precision can score the sample well enough, or none was measured in time.
        RunFailed, BenchFailed, EmbeddedError
            The reference settings cannot score the sample, for example because the model cannot be loaded.
        """
        started = system.monotonic()
        self.trials.until(started + (1 - _LAST_SHARE) * self.budget)
        try:
            measure = partial(self.trials.reference, self.budget * _SAMPLE_SHARE)
            reference = self._once("reference", ReferenceScores, measure)
        except BenchTimeout:
            raise self._too_short() from None
        self.trials.use(reference)
        step = "backend and precision"
        try:
            self._choose_backend(reference)
            step = "token_budget"
            self._climb(reference.device)
            step = "workers and threads"
            self._split(reference.device)
        except BenchTimeout:
            self._tell(f"the budget of {self.budget:,.0f} s has no time for more; not finished: {step}")
        gain = None
        try:
            self.trials.until(started + self.budget)
            gain = self._compare({}, self._best).gain or None
        except BenchTimeout:
            self._tell("no time was left to compare all changes with the initial settings")
        if gain:
            self._tell(f"all changes together: {gain:.2f} times as good as the initial settings")
        if gain and gain < 1:
            kept = () if self._all_kept else ("backend", "precision")
            self._best = {name: self._best[name] for name in kept}
            only = "but auto may stand for what is not taken above: only backend and precision are set"
            self._tell(f"the initial settings are better, {only if kept else 'so nothing is changed'}")
        return Tuned(self._best, gain, self._story)

    def _choose_backend(self, reference: ReferenceScores) -> None:
        self._tell(f"sample of {len(reference.scores)} pairs; ranks are compared with {label(REFERENCE)}")
        probes: list[PrecisionProbe] = []
        out_of_time = None
        # The kinds of int8, such as `int8-128`, are not tried, because the precision `int8` chooses one of
        # them.
        usual = tuple(name for name in get_args(Precision) if not name.startswith("int8-"))
        kinds = {name: plugins.load("rankmill.backends", name) for name in plugins.names("rankmill.backends")}
        backends = self._open("backend", ("auto", *sorted(kinds, key=lambda name: kinds[name].preference)))
        for backend in backends:
            if reference.device in kinds[backend].for_tests and len(backends) > 1:
                continue
            for precision in self._open("precision", usual):
                try:
                    measure = partial(self.trials.probe, backend, precision, reference)
                    probes.append(self._once(f"probe {backend}, {precision}", PrecisionProbe, measure))
                except BenchTimeout as error:
                    out_of_time = error
        self.trials.end_others(None)
        if out_of_time and not probes:
            raise self._too_short()
        good = self._good(probes)
        if not good:
            raise NothingWorks(
                f"no backend and precision reaches the required rank correlation on the sample "
                f"({self._story[-1]}); lower --min-spearman, or raise --budget with --restart"
            )
        self._best = {"backend": good[0].backend, "precision": good[0].precision}
        self._all_kept = out_of_time is None and len(good) == sum(not tried.reason for tried in probes)
        if out_of_time:
            raise out_of_time
        for probe in good[1:_FINALISTS]:
            if self.objective == "memory" or probe.seconds < _CHANCE * good[0].seconds:
                self._try({"backend": probe.backend, "precision": probe.precision})

    def _good(self, probes: list[PrecisionProbe]) -> list[PrecisionProbe]:
        """Return the measurements whose rankings agree with the reference, fastest first. Tells the user the
        result of each.
        """
        good, least = [], self.min_spearman
        for probe in probes:
            ranks = probe.agreement
            if probe.reason:
                outcome = f"not possible here: {probe.reason}"
            elif probe.lost:
                of = f"rows that lose the score they have with {label(REFERENCE)}"
                outcome = f"refused, {of}: {probe.lost:,}"
            elif ranks is None:
                outcome = "refused, all its scores are the same"
            elif ranks.verdict(least) == "kept":
                outcome = f"{probe.seconds:.2f} s, rank correlation {ranks}"
                good.append(probe)
            elif ranks.verdict(least) == "lost":
                outcome = f"refused, rank correlation {ranks} is below {least}"
            else:
                outcome = (
                    f"not taken, rank correlation {ranks} may be below {least}; a larger --budget takes a "
                    "larger sample, and rankmill check-precision takes an even larger one"
                )
            self._tell(f"{probe.backend}, {probe.precision}: {outcome}")
        return sorted(good, key=lambda probe: probe.seconds)

    def _climb(self, device: str) -> None:
        """Double the token budget as long as the cost falls. If the first doubling does not help, halve the
        budget instead.
        """
        if isinstance(self.base.token_budget, int):
            return
        first = TOKEN_BUDGETS[device]
        for factor in (2.0, 0.5):
            tokens = first * factor
            while self._try({"token_budget": int(tokens)}):
                tokens *= factor
            if "token_budget" in self._best:
                return

    def _split(self, device: str) -> None:
        if self.base.workers != "auto" or self.base.threads != "auto":
            return
        if device == "cpu":
            workers = 2
            while workers <= cores() and self._try({"workers": workers, "threads": cores() // workers}):
                workers *= 2
        elif device == "cuda":
            self._try({"workers": 2})

    def _try(self, changes: Changes) -> bool:
        """Try changes to the best settings so far. Changes that make the settings better are kept; returns
        whether the changes are kept.
        """
        challenger = {**self._best, **changes}
        costs = self._compare(self._best, challenger)
        won = costs.gain > _MARGIN
        if costs.reason:
            self._tell(f"{label(changes)}: not possible here: {costs.reason}")
        else:
            times = f"{costs.gain:.2f} times as good, measured {len(costs.first)} times in turn"
            self._tell(f"{label(changes)}: {times}: {'taken' if won else 'not taken'}")
        if won:
            self._best = challenger
        self.trials.end_others(self._best)
        return won

    def _compare(self, first: Changes, second: Changes) -> PairedCosts:
        name = f"{label(first)} against {label(second)}"
        return self._once(name, PairedCosts, lambda: self.trials.compare(first, second))

    def _open(self, setting: str, values: tuple[str, ...]) -> list[str]:
        """Return the values to try for a setting. For a setting that is ``auto``, these are `values` without
        ``auto``. For any other setting, only its own value is tried.
        """
        fixed = getattr(self.base, setting)
        return [value for value in values if value != "auto"] if fixed == "auto" else [fixed]

    def _once(self, name: str, kind: type[RecordT], measure: Callable[[], RecordT]) -> RecordT:
        """Return the recorded measurement `name`. If there is none, call `measure` and record its result.
        Raises `BenchTimeout` if time runs out.
        """
        record = self.records.get(name)
        if record is None:
            if system.monotonic() >= self.trials.deadline:
                raise BenchTimeout("no time is left")
            record = measure().model_dump()
            self.records.add(name, record)
        return kind.model_validate(record)

    def _too_short(self) -> NothingWorks:
        return NothingWorks(
            f"--budget {self.budget:,.0f}s is too short here: no backend is measured; give a longer one, "
            "what is measured is kept"
        )

    def _tell(self, line: str) -> None:
        self._story.append(line)
        self.say(line)
