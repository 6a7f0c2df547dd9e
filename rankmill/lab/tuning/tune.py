"""The search for the best settings: one setting after another, the most important first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.contract.spec import Precision
from rankmill.jobs.runtime.hosts import FOR_TESTS, TOKEN_BUDGETS
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.settings import BackendName, Settings
from rankmill.lab.tuning.grid import label
from rankmill.lab.tuning.records import Records
from rankmill.lab.tuning.trials import (
    REFERENCE,
    Changes,
    Comparison,
    Objective,
    Probe,
    Probes,
    Reference,
    Trials,
)

RecordT = TypeVar("RecordT", bound=BaseModel)

_MARGIN = 1.02
"""Smallest gain with which a change is taken; smaller gains are noise."""

_FINALISTS = 3
_CHANCE = 1.5
"""A backend and precision that took this many times as long as the fastest is not compared further."""

_SAMPLE_SHARE = 1 / 30
"""Share of the budget that the reference may take for the sample."""


class NothingWorks(RankmillError):
    """No backend and precision can score the sample here with the required rank correlation."""


class _OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Tuned:
    """The best settings found: ``changes`` to the settings that tuning began with, and its steps (``story``).

    ``gain`` is the cost of the first settings over the cost of the best ones, measured in turn at the end;
    `None` if one of them failed. If it is below 1, there are no changes.
    """

    changes: dict[str, Any]
    gain: float | None = None
    story: list[str] = field(default_factory=list)


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
        Most seconds to measure; a measurement that has begun is finished.
    min_spearman
        Rank correlation with the reference that a precision must reach.
    say
        Called with a line of text after each step.
    """

    def __init__(
        self,
        base: Settings,
        trials: Trials,
        objective: Objective,
        records: Records,
        *,
        budget: float,
        min_spearman: float,
        say: Callable[[str], None],
    ) -> None:
        self._base, self._trials, self._objective = base, trials, objective
        self._records, self._budget, self._min_spearman = records, budget, min_spearman
        self._say = say
        self._spent = 0.0
        self._best: dict[str, Any] = {}
        self._story: list[str] = []

    def tune(self) -> Tuned:
        """Search until everything was tried or the budget is spent.

        Raises
        ------
        NothingWorks
            No backend and precision can score the sample well enough.
        RunFailed
            The reference cannot score it, for example because the model cannot be loaded.
        """
        reference = self._once("reference", Reference, self._reference)
        self._trials.use(reference)
        step = "backend and precision"
        try:
            self._choose_backend(reference)
            step = "token_budget"
            self._climb(reference.device)
            step = "workers and threads"
            self._split(reference.device)
        except _OutOfTime:
            self._tell(f"the budget of {self._budget:,.0f} s is spent; not finished: {step}")
        gain = self._compare({}, self._best, always=True).gain or None
        if gain:
            self._tell(f"all changes together: {gain:.2f} times as good as the initial settings")
        if gain and gain < 1:
            self._tell("the initial settings are better: nothing is changed")
            self._best = {}
        return Tuned(self._best, gain, self._story)

    def _reference(self) -> Reference:
        return self._trials.reference(self._budget * _SAMPLE_SHARE)

    def _choose_backend(self, reference: Reference) -> None:
        """Measure each backend and precision once; then compare the fastest acceptable ones in turn."""
        self._tell(f"sample of {len(reference.scores)} pairs; ranks are compared with {label(REFERENCE)}")
        found: list[Probe] = []
        out_of_time = None
        backends = self._open("backend", get_args(BackendName))
        for backend in backends:
            if (backend, reference.device) in FOR_TESTS and len(backends) > 1:
                continue
            try:
                found += self._once(
                    f"probe {backend}", Probes, partial(self._probe, backend, reference)
                ).probes
            except _OutOfTime as error:
                out_of_time = error
        good = self._good(found)
        if not good:
            raise NothingWorks(
                f"no backend and precision reaches the required rank correlation on the sample "
                f"({self._story[-1]}); lower --min-spearman or raise --budget"
            )
        self._best = {"backend": good[0].backend, "precision": good[0].precision}
        if out_of_time:
            raise out_of_time
        for probe in good[1:_FINALISTS]:
            if self._objective == "memory" or probe.seconds < _CHANCE * good[0].seconds:
                self._try({"backend": probe.backend, "precision": probe.precision})

    def _probe(self, backend: str, reference: Reference) -> Probes:
        return self._trials.probe(backend, self._open("precision", get_args(Precision)), reference)

    def _good(self, found: list[Probe]) -> list[Probe]:
        """The probes that run here and keep the ranks, fastest first; reports why the others do not."""
        good = []
        for probe in found:
            name = f"{probe.backend}, {probe.precision}"
            if probe.reason:
                self._tell(f"{name}: not possible here: {probe.reason}")
                continue
            found_ranks = probe.agreement
            if found_ranks is None:
                self._tell(f"{name}: refused, all its scores are the same")
                continue
            verdict = found_ranks.verdict(self._min_spearman)
            ranks = f"rank correlation {found_ranks}"
            if verdict == "kept":
                self._tell(f"{name}: {probe.seconds:.2f} s, {ranks}")
                good.append(probe)
            elif verdict == "lost":
                self._tell(f"{name}: refused, {ranks} is below {self._min_spearman}")
            else:
                self._tell(
                    f"{name}: not taken, {ranks} may be below {self._min_spearman}; a larger --budget takes "
                    "a larger sample, and rankmill check-precision takes an even larger one"
                )
        return sorted(good, key=lambda probe: probe.seconds)

    def _climb(self, device: str) -> None:
        """Token budget: double it while that is better, or halve it while that is better."""
        if isinstance(self._base.token_budget, int):
            return
        first = TOKEN_BUDGETS[device]
        for factor in (2.0, 0.5):
            tokens = first * factor
            while self._try({"token_budget": int(tokens)}):
                tokens *= factor
            if "token_budget" in self._best:
                return

    def _split(self, device: str) -> None:
        """Number of workers, which share the cores or the GPU."""
        if self._base.workers != "auto" or self._base.threads != "auto":
            return
        if device == "cpu":
            workers = 2
            while workers <= cores() and self._try({"workers": workers, "threads": cores() // workers}):
                workers *= 2
        elif device == "cuda":
            self._try({"workers": 2})

    def _try(self, changes: Changes) -> bool:
        """Compare the best settings so far with and without `changes`; take the changes if that is better."""
        challenger = {**self._best, **changes}
        found = self._compare(self._best, challenger)
        won = found.gain > _MARGIN
        if found.reason:
            self._tell(f"{label(changes)}: not possible here: {found.reason}")
        else:
            times = f"{found.gain:.2f} times as good, measured {len(found.first)} times in turn"
            self._tell(f"{label(changes)}: {times}: {'taken' if won else 'not taken'}")
        if won:
            self._best = challenger
        self._trials.end_others(self._best)
        return won

    def _compare(self, first: Changes, second: Changes, *, always: bool = False) -> Comparison:
        name = f"{label(first)} against {label(second)}"
        return self._once(name, Comparison, lambda: self._trials.compare(first, second), always)

    def _open(self, setting: str, values: tuple[str, ...]) -> list[str]:
        """Values to try: all, or only the one that the settings fix."""
        fixed = getattr(self._base, setting)
        return [value for value in values if value != "auto"] if fixed == "auto" else [fixed]

    def _once(
        self, name: str, kind: type[RecordT], measure: Callable[[], RecordT], always: bool = False
    ) -> RecordT:
        """The value recorded under `name`; else measure and record it, if the budget or `always` allows."""
        record = self._records.get(name)
        if record is None:
            if self._spent > self._budget and not always:
                raise _OutOfTime
            started = time.monotonic()
            value = measure()
            record = {"seconds": time.monotonic() - started, "value": value.model_dump()}
            self._records.add(name, record)
        self._spent += record["seconds"]
        return kind(**record["value"])

    def _tell(self, line: str) -> None:
        self._story.append(line)
        self._say(line)
