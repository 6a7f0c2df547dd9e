"""The search for the best settings: what matters most first, each against the best so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from jobs.errors import RankmillError
from jobs.runtime.hosts import FOR_TESTS, TOKEN_BUDGETS, cores
from jobs.runtime.settings import Backend, Settings
from jobs.spec import Precision
from rankmill.tuning.grid import label
from rankmill.tuning.records import Records
from rankmill.tuning.trials import REFERENCE, Changes, Duel, Objective, Probe, Probes, Reference, Trials

Kept = TypeVar("Kept", bound=BaseModel)

_MARGIN = 1.02
"""What a setting has to win by; less is noise."""

_FINALISTS = 3
_CHANCE = 1.5
"""A backend and precision that took so many times as long as the fastest is out."""

_SAMPLE_SHARE = 1 / 30
"""Share of the budget that the reference may take for the sample."""


class NothingWorks(RankmillError):
    """No backend and precision can score the sample here as well as it must be."""


class _OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Tuned:
    """What won: ``changes`` to the settings that tuning began with, and how it came to that.

    ``gain`` is how many times better what was found is than those, measured in turn at the end; `None` if
    one of them failed. Where it is below 1 there are no changes.
    """

    changes: dict[str, Any]
    gain: float | None = None
    story: list[str] = field(default_factory=list)


class Tuner:
    """Tunes what the settings leave to ``auto``; what they fix stays.

    Parameters
    ----------
    base
        Settings to begin with.
    trials
        What measures.
    objective
        What counts.
    records
        What was measured before an interruption, which is not measured again.
    budget
        Seconds to measure, at most; a measurement that has begun is finished.
    min_spearman
        Rank correlation with the reference that a precision must have.
    say
        Told each step as it is done.
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
            Nothing can score the sample.
        RunFailed
            Nor can the reference: the model cannot be loaded, say.
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
        gain = self._against({}, self._best, always=True).gain or None
        if gain:
            self._tell(f"all together: {gain:.2f} times as good as the settings it began with")
        if gain and gain < 1:
            self._tell("the settings it began with stay")
            self._best = {}
        return Tuned(self._best, gain, self._story)

    def _reference(self) -> Reference:
        return self._trials.reference(self._budget * _SAMPLE_SHARE)

    def _choose_backend(self, reference: Reference) -> None:
        """Backend and precision: each once; the fastest that are good enough then in turn."""
        self._tell(f"sample of {len(reference.scores)} pairs; ranks are compared with {label(REFERENCE)}")
        found: list[Probe] = []
        out_of_time = None
        backends = self._open("backend", get_args(Backend))
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
                f"no backend and precision was found that scores the sample as well as it must be "
                f"({self._story[-1]}); see --min-spearman and --budget"
            )
        self._best = {"backend": good[0].backend, "precision": good[0].precision}
        if out_of_time:
            raise out_of_time
        for probe in good[1:_FINALISTS]:
            if self._objective == "memory" or probe.seconds < _CHANCE * good[0].seconds:
                self._challenge({"backend": probe.backend, "precision": probe.precision})

    def _probe(self, backend: str, reference: Reference) -> Probes:
        return self._trials.probe(backend, self._open("precision", get_args(Precision)), reference)

    def _good(self, found: list[Probe]) -> list[Probe]:
        """Those that can be had and keep the ranks, fastest first; says what the others lack."""
        good = []
        for probe in found:
            name = f"{probe.backend}, {probe.precision}"
            if probe.reason:
                self._tell(f"{name}: not here: {probe.reason}")
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
                    f"{name}: not taken, {ranks} may be below {self._min_spearman}; a larger --budget "
                    "has a larger sample, and rankmill check-precision a larger one still"
                )
        return sorted(good, key=lambda probe: probe.seconds)

    def _climb(self, device: str) -> None:
        """The token budget: doubled as long as that wins; else halved."""
        if isinstance(self._base.token_budget, int):
            return
        first = TOKEN_BUDGETS[device]
        for factor in (2.0, 0.5):
            tokens = first * factor
            while self._challenge({"token_budget": int(tokens)}):
                tokens *= factor
            if "token_budget" in self._best:
                return

    def _split(self, device: str) -> None:
        """Workers, and the cores or GPUs shared among them."""
        if self._base.workers != "auto" or self._base.threads != "auto":
            return
        if device == "cpu":
            workers = 2
            while workers <= cores() and self._challenge({"workers": workers, "threads": cores() // workers}):
                workers *= 2
        elif device == "cuda":
            self._challenge({"workers": 2})

    def _challenge(self, changes: Changes) -> bool:
        """Whether the best so far is better with `changes`; then they are part of it."""
        challenger = {**self._best, **changes}
        duel = self._against(self._best, challenger)
        won = duel.gain > _MARGIN
        if duel.reason:
            self._tell(f"{label(changes)}: not here: {duel.reason}")
        else:
            times = f"{duel.gain:.2f} times as good, {len(duel.first)} in turn"
            self._tell(f"{label(changes)}: {times}: {'taken' if won else 'not taken'}")
        if won:
            self._best = challenger
        self._trials.keep(self._best)
        return won

    def _against(self, first: Changes, second: Changes, *, always: bool = False) -> Duel:
        name = f"{label(first)} against {label(second)}"
        return self._once(name, Duel, lambda: self._trials.duel(first, second), always)

    def _open(self, setting: str, values: tuple[str, ...]) -> list[str]:
        """The values to try: all, or the one that the settings fix."""
        fixed = getattr(self._base, setting)
        return [value for value in values if value != "auto"] if fixed == "auto" else [fixed]

    def _once(self, name: str, kind: type[Kept], measure: Callable[[], Kept], always: bool = False) -> Kept:
        """What was recorded under `name`, or is now, if there is time or it is `always` wanted."""
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
