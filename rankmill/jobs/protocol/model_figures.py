"""Metrics of each model, to compare versions: pairs, time to the result, distribution of the scores."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.protocol.worker_report import LATENCY_BUCKETS
from rankmill.jobs.system import system

_MODELS = 100
"""Metrics are kept for at most this many models. If a further model scores, the model that has scored nothing
for longest loses its metrics.
"""

SCORE_BUCKETS = (
    -10, -5, -3, -2, -1, -0.5, 0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99,
    1, 2, 3, 5, 10,
)  # fmt: skip
"""Upper bounds of the buckets of scores; they suit both probabilities and logits."""

ModelName = tuple[str, str]
"""The names of a model and of its revision."""


class _Distribution:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def add(self, values: npt.NDArray[np.floating]) -> None:
        places = np.searchsorted(self._bounds, values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum(dtype=np.float64))

    def write(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        counts = map(float, np.cumsum(self._counts))
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), self._sum)


@dataclass
class _Figures:
    pairs: dict[Priority, int] = field(default_factory=dict)
    latency: dict[Priority, _Distribution] = field(default_factory=dict)
    scores: _Distribution = field(default_factory=lambda: _Distribution(SCORE_BUCKETS))


class ModelFigures(Collector):
    """The metrics of the models that score for this process; threads may share the object.

    Parameters
    ----------
    prefix
        Prefix of the metrics' names.
    latency
        Help text of the metric for latency.
    """

    def __init__(self, prefix: str, latency: str) -> None:
        self._prefix, self._latency = prefix, latency
        self._lock = system.Lock()
        self._models: OrderedDict[ModelName, _Figures] = OrderedDict()

    def count(
        self,
        name: ModelName,
        priority: Priority,
        scores: npt.NDArray[np.floating],
        seconds: float | None,
        outputs: int = 1,
    ) -> None:
        """Count a chunk's scores. If the seconds until its result are known, count them, too.

        `scores` has `outputs` numbers for each row, all NaN for a row without a score.
        """
        scored = scores[~np.isnan(scores)]
        with self._lock:
            figures = self._models.setdefault(name, _Figures())
            self._models.move_to_end(name)
            if len(self._models) > _MODELS:
                self._models.popitem(last=False)
            figures.pairs[priority] = figures.pairs.get(priority, 0) + len(scored) // outputs
            figures.scores.add(scored)
            if seconds is not None:
                latency = figures.latency.setdefault(priority, _Distribution(LATENCY_BUCKETS))
                latency.add(np.array([max(seconds, 0.0)]))

    def describe(self) -> Iterable[Metric]:
        return self._families()

    def collect(self) -> Iterable[Metric]:
        pairs, latency, scores = families = self._families()
        with self._lock:
            for name, figures in self._models.items():
                for priority, count in figures.pairs.items():
                    pairs.add_metric([*name, priority], count)
                for priority, distribution in figures.latency.items():
                    distribution.write(latency, [*name, priority])
                figures.scores.write(scores, list(name))
        return families

    def _families(self) -> tuple[CounterMetricFamily, HistogramMetricFamily, HistogramMetricFamily]:
        labels = ["model", "revision"]
        return (
            CounterMetricFamily(
                f"{self._prefix}_pairs", "Pairs with a score, by model.", labels=[*labels, "priority"]
            ),
            HistogramMetricFamily(
                f"{self._prefix}_latency_seconds", self._latency, labels=[*labels, "priority"]
            ),
            HistogramMetricFamily(
                f"{self._prefix}_score", "Scores, by model: their distribution.", labels=labels
            ),
        )
