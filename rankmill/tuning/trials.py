"""What tuning measures: the precisions of a backend, and which of two settings is better."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel

from jobs.errors import EmbeddedError, RunFailed
from jobs.runtime.settings import Settings
from rankmill.local.embedded import worker_environs
from rankmill.session import Scored
from rankmill.tuning.agreement import Agreement, agreement
from rankmill.tuning.bench import Bench, BenchFailed, cut
from rankmill.tuning.experiment import Value

Objective = Literal["throughput", "latency", "memory"]
Changes = Mapping[str, Value]
"""Settings that differ from those that tuning began with."""

REFERENCE: Changes = {"backend": "torch", "precision": "fp32"}
"""Whose ranks others must keep."""

MAX_ROWS = 2000
"""Pairs in a sample, at most."""

_MIN_ROWS = 200
"""So many decide most precisions: of 40 samples of 4 queries with 50 rows of MS MARCO, 37 keep bf16 at 0.999
(0.9997 by all rows), 3 are undecided and none refuses it; of 20 queries with 10 rows, 29 are undecided."""
_ROUNDS = 3
_CLEAR = 1.5
"""Factor at which one measurement of each is enough."""
_WARM_UP = 16
_REQUEST_SIZE = 20


class Reference(BaseModel):
    """Scores of the sample in the reference's precision; there are as many rows as the time allows."""

    scores: list[float]
    device: str


class Probe(BaseModel):
    """A backend and precision: seconds for the sample, and how it ranks beside the reference.

    ``reason`` says why it cannot be had here.
    """

    backend: str
    precision: str
    reason: str = ""
    seconds: float = 0.0
    agreement: Agreement | None = None


class Probes(BaseModel):
    """Those of a backend."""

    probes: list[Probe]


class Duel(BaseModel):
    """Two settings measured in turn: costs of each, less being better; ``reason``: one of them failed."""

    first: list[float] = []
    second: list[float] = []
    reason: str = ""

    @property
    def gain(self) -> float:
        """How many times better the second is: the median over the rounds, as a machine's speed drifts."""
        return float(np.median(np.divide(self.first, self.second))) if self.second else 0.0


class Trials:
    """Measures on this machine. Workers of the settings that won last live on for the next duel.

    Parameters
    ----------
    base
        Settings that every trial begins with.
    pairs
        The sample; `reference` cuts it to what can be scored in time.
    objective
        What counts: seconds of a bulk run, p95 seconds of lone requests, or bytes of peak memory.
    timeout
        Seconds for any workers, at most.

    Attributes
    ----------
    pairs
        The sample.
    """

    def __init__(self, base: Settings, pairs: pa.Table, objective: Objective, timeout: float) -> None:
        self._base, self.pairs, self._objective, self._timeout = base, pairs, objective, timeout
        self._live: dict[str, Bench] = {}

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep(None)

    def reference(self, seconds: float) -> Reference:
        """Score as much of the sample as takes `seconds`, with `REFERENCE`."""
        with self._bench(REFERENCE) as bench:
            few = self.pairs.slice(0, 2 * _WARM_UP)
            bench.warm_up(few)
            bench.bulk(few)  # the first time of whatever shapes it has is slow
            rows = max(_MIN_ROWS, int(seconds * len(few) / bench.bulk(few).seconds))
            scored = bench.bulk(self.pairs.slice(0, rows))
        return Reference(scores=scored.scores.tolist(), device=scored.stats[0].device)

    def use(self, reference: Reference) -> None:
        """Measure with the rows that the reference has scored."""
        self.pairs = self.pairs.slice(0, len(reference.scores))

    def probe(self, backend: str, precisions: Iterable[str], reference: Reference) -> Probes:
        """Try each precision of a backend once, in the same workers as long as these live."""
        left, probes = list(precisions), []
        while left:
            try:
                with self._bench({"backend": backend}) as bench:
                    while left:
                        probes.append(self._probe(bench, backend, left[0], reference))
                        left.pop(0)
            except (BenchFailed, EmbeddedError) as error:
                probes.append(Probe(backend=backend, precision=left.pop(0), reason=str(error)))
        return Probes(probes=probes)

    def duel(self, first: Changes, second: Changes) -> Duel:
        """Measure two settings in turn, so that what else the machine does meets both."""
        duel = Duel()
        try:
            one, other = self.warm(first), self.warm(second)
            for number in range(_ROUNDS):
                benches = [(one, duel.first), (other, duel.second)]
                for bench, costs in benches if number % 2 == 0 else benches[::-1]:
                    costs.append(self._cost(bench))
                if self._objective == "memory" or not 1 / _CLEAR < duel.gain < _CLEAR:
                    break
        except (BenchFailed, RunFailed, EmbeddedError) as error:
            return Duel(reason=str(error))
        return duel

    def warm(self, changes: Changes) -> Bench:
        """The live workers of these settings.

        Raises
        ------
        BenchFailed, RunFailed, EmbeddedError
            They cannot be had.
        """
        name = _name(changes)
        if name not in self._live:
            self._live[name] = self._bench(changes).__enter__()
            self._live[name].warm_up(self.pairs.slice(0, _WARM_UP))
        return self._live[name]

    def bulk(self, bench: Bench, **spec: Any) -> Scored:
        """Let every worker score the sample: its scores, and the seconds for one sample.

        It is small: shared among workers, it would be one chunk for one of them, or chunks of so few
        rows that little could be sorted by length.
        """
        scored = bench.bulk(pa.concat_tables([self.pairs] * bench.workers), **spec)
        once = scored.scores[: len(self.pairs)]
        return dataclasses.replace(scored, scores=once, seconds=scored.seconds / bench.workers)

    def keep(self, winner: Changes | None) -> None:
        """End all workers but those of `winner`."""
        for name in list(self._live):
            if winner is None or name != _name(winner):
                self._live.pop(name).__exit__(None, None, None)

    def _bench(self, changes: Changes) -> Bench:
        settings = Settings(**{**self._base.model_dump(), **changes})
        if len(worker_environs(settings)) > 1:  # none may claim the share of another
            share = {"chunk_size": min(settings.chunk_size, len(self.pairs)), "claim_ahead": 1}
            settings = settings.model_copy(update=share)
        return Bench(settings, self._timeout)

    def _probe(self, bench: Bench, backend: str, precision: str, reference: Reference) -> Probe:
        known: dict[str, Any] = {"backend": backend, "precision": precision}
        try:
            bench.warm_up(self.pairs.slice(0, _WARM_UP), precision=precision)
            scored = self.bulk(bench, precision=precision)
        except RunFailed as error:
            return Probe(**known, reason=str(error))
        found = ranks_kept(self.pairs, scored.scores, reference.scores)
        return Probe(**known, seconds=scored.seconds, agreement=found)

    def _cost(self, bench: Bench) -> float:
        if self._objective == "latency":
            requests = cut(self.pairs, max(len(self.pairs) // _REQUEST_SIZE, 5), _REQUEST_SIZE)
            return float(np.percentile([answer.seconds for answer in bench.requests(requests, 1)], 95))
        seconds = self.bulk(bench).seconds
        return seconds if self._objective == "throughput" else float(bench.peak_bytes)


def ranks_kept(pairs: pa.Table, scores: npt.NDArray[np.float32], reference: list[float]) -> Agreement | None:
    """Agreement within a query; over all rows where no query has two ranks; ``None`` if these have none."""
    expected = np.asarray(reference, np.float32)
    found = agreement(pairs["query"].to_pylist(), scores, expected)
    return found or agreement([""] * len(pairs), scores, expected)


def _name(changes: Changes) -> str:
    return json.dumps(changes, sort_keys=True)
