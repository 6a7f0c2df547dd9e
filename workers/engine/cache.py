"""The models a worker keeps loaded."""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jobs.errors import SpecError
from jobs.spec import ScoreSpec, WeightsKey, weights_key
from workers import metrics
from workers.device import empty_cache
from workers.engine.engine import Engine
from workers.models.loading import Loaded, Model

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of each file of a model on this disk; empty for one from the hub."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much is kept: a number of models, bytes of weights, seconds without use; `None` is no limit."""

    models: int
    bytes: int | None = None
    idle_seconds: float | None = None


@dataclass
class _Kept:
    loaded: Loaded
    stamp: Stamp
    used: float
    engines: dict[ScoreSpec, Engine] = field(default_factory=dict)


class EngineCache:
    """Engines by spec; those of one model and precision share its weights. The least recently used go first.

    Used from one thread.

    Parameters
    ----------
    load
        `workers.models.loading.load`, its device and backend given.
    device
        Where it puts models.
    limits
        What is kept. The model in use stays, however large it is.
    make
        Makes an engine for a model.
    drain
        Waits until no engine is in use; called before one makes room for another.
    """

    def __init__(
        self,
        load: Callable[[ScoreSpec], Loaded],
        device: str,
        limits: Limits,
        make: Callable[[Model], Engine],
        drain: Callable[[], None],
    ) -> None:
        self._load = load
        self._device = device
        self._limits = limits
        self._make = make
        self._drain = drain
        self._kept: OrderedDict[WeightsKey, _Kept] = OrderedDict()
        self._bytes_of: dict[WeightsKey, int] = {}
        self.loading: str | None = None
        """Name of the model that is being loaded."""
        metrics.model_bytes.set_function(lambda: self.bytes)

    @property
    def bytes(self) -> int:
        """Of all weights that are loaded."""
        return sum(kept.loaded.backend.bytes for kept in list(self._kept.values()))

    @property
    def models(self) -> list[str]:
        """Names of the models that are loaded, the least recently used first."""
        return [model for model, _, _ in list(self._kept)]

    def get(self, spec: ScoreSpec) -> Engine:
        """The engine of `spec`; loads its model if need be, or if its files have changed.

        Raises
        ------
        SpecError
            As `workers.models.loading.load` does.
        """
        key, stamp = weights_key(spec), _stamp(spec)
        kept = self._kept.get(key)
        if kept is not None and kept.stamp != stamp:
            logger.info("the files of %s have changed, loading them", spec.model)
            self._remove(key)
            metrics.model_unloads.inc()
            kept = None
        if kept is None:
            self._make_room(key)
            kept = self._kept[key] = _Kept(self._load_timed(spec), stamp, time.monotonic())
            self._tell()
            self._bytes_of[key] = kept.loaded.backend.bytes
            self._make_room(key)  # again: until now its size may have been unknown
        else:
            metrics.model_hits.inc()
        self._kept.move_to_end(key)
        kept.used = time.monotonic()
        if spec not in kept.engines:
            kept.engines[spec] = self._make(kept.loaded.model(spec))
        return kept.engines[spec]

    def warm(self, spec: ScoreSpec) -> None:
        """Load a model and score with it once, so that the first request need not wait.

        Where that fails the log says why; the worker can serve others.
        """
        try:
            self.get(spec).score(["warm"], ["up"])
        except SpecError as error:
            logger.error("cannot warm up: %s", error)

    @property
    def is_full(self) -> bool:
        """Whether another model may need the place of one that is there."""
        return len(self._kept) >= self._limits.models or (bool(self._kept) and self._limits.bytes is not None)

    def fits(self, spec: ScoreSpec) -> bool:
        """Whether `get` needs no other model to leave."""
        key = weights_key(spec)
        return key in self._kept or not self._too_much(key)

    def unload_idle(self) -> None:
        """Let go of models that nobody has asked for in `Limits.idle_seconds`."""
        if self._limits.idle_seconds is None:
            return
        since = time.monotonic() - self._limits.idle_seconds
        for key in [key for key, kept in self._kept.items() if kept.used < since]:
            logger.info("unloading %s, which is idle", key[0])
            self._remove(key)
            metrics.model_unloads.inc()

    def _load_timed(self, spec: ScoreSpec) -> Loaded:
        self.loading, outcome = spec.model, "failed"
        try:
            with metrics.model_load_seconds.time():
                loaded = self._load(spec)
            outcome = "loaded"
            return loaded
        finally:
            self.loading = None
            metrics.model_loads.labels(outcome).inc()

    def _make_room(self, key: WeightsKey) -> None:
        """Before loading, as far as the size is known: the device may not hold both."""
        while any(other != key for other in self._kept) and self._too_much(key):
            self._drain()
            self._remove(next(other for other in self._kept if other != key))
            metrics.model_evictions.inc()

    def _too_much(self, key: WeightsKey) -> bool:
        """Whether what is kept and the model of `key` are over a limit together."""
        together = {each: kept.loaded.backend.bytes for each, kept in self._kept.items()}
        together.setdefault(key, self._bytes_of.get(key, 0))
        if len(together) > self._limits.models:
            return True
        return self._limits.bytes is not None and sum(together.values()) > self._limits.bytes

    def _remove(self, key: WeightsKey) -> None:
        del self._kept[key]
        self._tell()
        gc.collect()
        empty_cache(self._device)

    def _tell(self) -> None:
        """Let the metrics show what is loaded."""
        metrics.models.clear()
        for (model, _, _), kept in self._kept.items():
            runner = kept.loaded.backend
            revision = kept.loaded.revision or ""
            metrics.models.labels(model, revision, runner.name, runner.device, runner.precision).set(1)


def _stamp(spec: ScoreSpec) -> Stamp:
    folder = Path(spec.model).expanduser()
    if not folder.is_dir():
        return ()
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
    return tuple((file.name, found.st_size, found.st_mtime_ns) for file in files for found in [file.stat()])
