"""Measurements for tuning: the precisions of a backend, and comparisons of two settings."""

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

from rankmill.jobs.contract.errors import EmbeddedError, RunFailed
from rankmill.jobs.runtime.settings import Settings
from rankmill.lab.tuning.agreement import Agreement, agreement
from rankmill.lab.tuning.bench import Bench, BenchFailed, split_requests
from rankmill.lab.tuning.experiment import Value
from rankmill.producer.local.embedded import worker_environs
from rankmill.score.session import RunScores

Objective = Literal["throughput", "latency", "memory"]
Changes = Mapping[str, Value]
"""Changes to the settings that tuning began with."""

REFERENCE: Changes = {"backend": "torch", "precision": "fp32"}
"""Settings whose ranks other backends and precisions must reproduce."""

MAX_ROWS = 2000
"""Most pairs in a sample."""

_MIN_ROWS = 200
"""This many rows decide most precisions: of 40 samples of MS MARCO with 4 queries and 50 rows each, 37 keep
bf16 at 0.999 (0.9997 on all rows), 3 are undecided and none refuses it; with 20 queries and 10 rows each, 29
are undecided."""
_ROUNDS = 3
_CLEAR = 1.5
"""If one of two settings is better by this factor, one measurement of each is enough."""
_WARM_UP = 16
_REQUEST_SIZE = 20


class Reference(BaseModel):
    """Scores of the sample with the `REFERENCE` settings; the time allowed limits their number."""

    scores: list[float]
    device: str


class Probe(BaseModel):
    """A backend and precision: seconds for the sample, and rank agreement with the reference.

    ``reason`` says why it cannot run here.
    """

    backend: str
    precision: str
    reason: str = ""
    seconds: float = 0.0
    agreement: Agreement | None = None


class Probes(BaseModel):
    """The probes of a backend."""

    probes: list[Probe]


class Comparison(BaseModel):
    """Two settings measured in turn: the costs of each (less is better); ``reason`` if one of them failed."""

    first: list[float] = []
    second: list[float] = []
    reason: str = ""

    @property
    def gain(self) -> float:
        """Cost of the first over that of the second: the median over the rounds, as speeds drift."""
        return float(np.median(np.divide(self.first, self.second))) if self.second else 0.0


class Trials:
    """Measures settings on this machine. Workers of the best settings stay alive for the next comparison.

    Parameters
    ----------
    base
        Settings that every trial changes.
    pairs
        The sample; `use` shortens it to the rows that the reference has scored.
    objective
        The cost: seconds of a bulk run, p95 seconds of single requests, or bytes of peak memory.
    timeout
        Most seconds that any workers may live.

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
        self.end_others(None)

    def reference(self, seconds: float) -> Reference:
        """Score with the `REFERENCE` settings as many rows of the sample as take about `seconds`."""
        with self._bench(REFERENCE) as bench:
            few = self.pairs.slice(0, 2 * _WARM_UP)
            bench.warm_up(few)
            bench.bulk(few)  # the first forward of each shape is slow
            rows = max(_MIN_ROWS, int(seconds * len(few) / bench.bulk(few).seconds))
            scored = bench.bulk(self.pairs.slice(0, rows))
        return Reference(scores=scored.scores.tolist(), device=scored.stats[0].device)

    def use(self, reference: Reference) -> None:
        """Shorten the sample to the rows that the reference has scored."""
        self.pairs = self.pairs.slice(0, len(reference.scores))

    def probe(self, backend: str, precisions: Iterable[str], reference: Reference) -> Probes:
        """Measure each precision of a backend once; workers that die are replaced for the next precision."""
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

    def compare(self, first: Changes, second: Changes) -> Comparison:
        """Measure two settings in turn, so that other load on the machine affects both."""
        found = Comparison()
        try:
            one, other = self.warm(first), self.warm(second)
            for number in range(_ROUNDS):
                benches = [(one, found.first), (other, found.second)]
                for bench, costs in benches if number % 2 == 0 else benches[::-1]:
                    costs.append(self._cost(bench))
                if self._objective == "memory" or not 1 / _CLEAR < found.gain < _CLEAR:
                    break
        except (BenchFailed, RunFailed, EmbeddedError) as error:
            return Comparison(reason=str(error))
        return found

    def warm(self, changes: Changes) -> Bench:
        """The live workers of these settings; starts and warms up workers if there are none.

        Raises
        ------
        BenchFailed, RunFailed, EmbeddedError
            The workers cannot be started or cannot score.
        """
        name = _name(changes)
        if name not in self._live:
            self._live[name] = self._bench(changes).__enter__()
            self._live[name].warm_up(self.pairs.slice(0, _WARM_UP))
        return self._live[name]

    def bulk(self, bench: Bench, **spec: Any) -> RunScores:
        """Let every worker score the whole sample; returns its scores, and the seconds for one sample.

        The sample is too small to be shared: it would be one chunk for one worker, or chunks of too few rows
        to sort by length.
        """
        scored = bench.bulk(pa.concat_tables([self.pairs] * bench.workers), **spec)
        once = scored.scores[: len(self.pairs)]
        return dataclasses.replace(scored, scores=once, seconds=scored.seconds / bench.workers)

    def end_others(self, winner: Changes | None) -> None:
        """End all workers except those of `winner`."""
        for name in list(self._live):
            if winner is None or name != _name(winner):
                self._live.pop(name).__exit__(None, None, None)

    def _bench(self, changes: Changes) -> Bench:
        settings = Settings(**{**self._base.model_dump(), **changes})
        if len(worker_environs(settings)) > 1:  # no worker may claim another's share
            most = len(self.pairs) if settings.chunk_size == "auto" else settings.chunk_size
            share = {"chunk_size": min(most, len(self.pairs)), "claim_ahead": 1}
            settings = settings.model_copy(update=share)
        return Bench(settings, self._timeout)

    def _probe(self, bench: Bench, backend: str, precision: str, reference: Reference) -> Probe:
        known: dict[str, Any] = {"backend": backend, "precision": precision}
        try:
            bench.warm_up(self.pairs.slice(0, _WARM_UP), precision=precision)
            scored = self.bulk(bench, precision=precision)
        except RunFailed as error:
            return Probe(**known, reason=str(error))
        found = rank_agreement(self.pairs, scored.scores, reference.scores)
        return Probe(**known, seconds=scored.seconds, agreement=found)

    def _cost(self, bench: Bench) -> float:
        if self._objective == "latency":
            requests = split_requests(self.pairs, max(len(self.pairs) // _REQUEST_SIZE, 5), _REQUEST_SIZE)
            return float(np.percentile([answer.seconds for answer in bench.requests(requests, 1)], 95))
        seconds = self.bulk(bench).seconds
        return seconds if self._objective == "throughput" else float(bench.peak_bytes)


def rank_agreement(
    pairs: pa.Table, scores: npt.NDArray[np.float32], reference: list[float]
) -> Agreement | None:
    """Agreement within queries, or over all rows if no query has two ranks; ``None`` if they have none."""
    expected = np.asarray(reference, np.float32)
    found = agreement(pairs["query"].to_pylist(), scores, expected)
    return found or agreement([""] * len(pairs), scores, expected)


def _name(changes: Changes) -> str:
    return json.dumps(changes, sort_keys=True)
