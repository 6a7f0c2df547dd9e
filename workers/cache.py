"""The models a worker keeps loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from jobs.spec import ScoreSpec
from workers import metrics
from workers.engine import Engine
from workers.models import load_model


class EngineCache:
    """Least-recently-used cache of engines, keyed by spec.

    Parameters
    ----------
    device
        Where models are put.
    size
        Models kept at a time, at least one.
    token_budget
        Each engine's budget to start with, in padded tokens.
    drain
        Waits until no engine is in use; called before one makes room for another.
    backend
        What runs the models: ``auto``, ``torch`` or ``openvino``.
    max_batch, length_aware
        How each engine cuts batches.
    """

    def __init__(
        self,
        device: str,
        size: int,
        token_budget: int,
        drain: Callable[[], None],
        backend: str,
        *,
        max_batch: int | None = None,
        length_aware: bool = True,
    ) -> None:
        self._device = device
        self._size = size
        self._token_budget = token_budget
        self._max_batch = max_batch
        self._length_aware = length_aware
        self._drain = drain
        self._backend = backend
        self._engines: OrderedDict[ScoreSpec, Engine] = OrderedDict()
        self.loading: str | None = None
        """Name of the model that is being loaded."""

    def get(self, spec: ScoreSpec) -> Engine:
        """The engine of `spec`; loads its model if need be.

        Raises
        ------
        SpecError
            As `workers.models.load_model` does.
        """
        if spec not in self._engines:
            while len(self._engines) >= self._size:
                self._drain()
                self._engines.popitem(last=False)  # before loading: the device may not hold both
                metrics.model_evictions.inc()
            self._engines[spec] = self._load(spec)
            self._tell()
        self._engines.move_to_end(spec)
        return self._engines[spec]

    def _load(self, spec: ScoreSpec) -> Engine:
        self.loading, outcome = spec.model, "failed"
        try:
            with metrics.model_load_seconds.time():
                engine = Engine(
                    load_model(spec, self._device, self._backend),
                    self._token_budget,
                    max_batch=self._max_batch,
                    length_aware=self._length_aware,
                )
            outcome = "loaded"
            return engine
        finally:
            self.loading = None
            metrics.model_loads.labels(outcome).inc()

    def _tell(self) -> None:
        """Let the metrics show what is loaded."""
        metrics.models.clear()
        for spec, engine in self._engines.items():
            model = engine.model
            runner = model.backend
            metrics.models.labels(
                spec.model, model.revision or "", runner.name, runner.device, runner.precision
            ).set(1)
