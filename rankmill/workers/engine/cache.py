"""The cache of a worker's loaded models."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from prometheus_client import Counter

from rankmill.jobs.cache import Facts, cache_folder
from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.home import model_folder
from rankmill.jobs.contract.prompts import TEXTS_ALONE
from rankmill.jobs.contract.spec import ScoreSpec, WeightsKey, weights_key
from rankmill.jobs.model_files import model_facts
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.jobs.system import system
from rankmill.workers.backends.base import OutOfMemory
from rankmill.workers.engine.batch_size import BatchSize
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host import metrics
from rankmill.workers.host.device import empty_cache
from rankmill.workers.models.loading import Loaded, Model, one_line
from rankmill.workers.models.probes import Probe, columns_of
from rankmill.workers.models.sources import directory_content

Stamp = Mapping[str, Facts]
"""The size and time of each file in a model's directory, by name. They show whether a file has changed. Empty
if the model is not a directory, or if a file cannot be read.
"""

_ENGINES = 100
"""At most this many engines are kept for a loaded model, one for each set of a spec's options. Beyond that,
the least recently used engine is dropped.
"""

logger = logging.getLogger(__name__)


@dataclass
class _CachedModel:
    spec: ScoreSpec
    loaded: Loaded
    stamp: Stamp
    used: float
    engines: dict[ScoreSpec, Engine] = field(default_factory=dict)

    def last_use(self, in_use: Set[Engine | None]) -> float:
        if not in_use.isdisjoint(self.engines.values()):
            self.used = system.monotonic()
        return self.used


class EngineCache:
    """Loads models and keeps an engine for each spec. Engines of specs with an equal `weights_key` share
    their weights.

    The least recently used model is unloaded first. The cache is used from one thread only.

    Parameters
    ----------
    settings
        The worker's settings. They set the size of batches, and limit the number of loaded models, the bytes
        of their weights, and the seconds for which a model stays loaded without use. The model in use stays
        loaded even if it exceeds the limits by itself.
    device
        The device of the models.
    load
        Loads a model on the device, as `rankmill.workers.models.loading.load` does.
    drain
        Waits until no engine is in use; called before a model is unloaded, except by `unload_idle`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        device: str,
        load: Callable[[ScoreSpec], Loaded],
        drain: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._device = device
        self._load = load
        self._drain = drain
        self._cached: OrderedDict[WeightsKey, _CachedModel] = OrderedDict()
        self._bytes_of: dict[WeightsKey, int] = {}
        self._loads = 0
        self._shown: set[tuple[str, ...]] = set()
        self.loading: str | None = None
        """Name of the model that is being loaded; other threads read it."""

    @property
    def bytes(self) -> int:
        return sum(cached.loaded.backend.bytes for cached in self._cached.values())

    @property
    def models(self) -> list[str]:
        """Names of the loaded models, from the least to the most recently used."""
        return [model for model, *_ in self._cached]

    def get(self, spec: ScoreSpec) -> Engine:
        """Return the engine that scores the rows of `spec`. Loads the model if it is missing or has changed.

        If the spec names a revision whose content is loaded, the engine uses that content, even if the files
        in the model's directory have changed since.

        Raises
        ------
        SpecError, MemoryError, OutOfMemory, DeviceLost
            As in `rankmill.workers.models.loading.load`.
        """
        key = self._first_that_loads(self._weights_of(spec))
        cached = self._cached[key]
        self._cached.move_to_end(key)
        cached.used = system.monotonic()
        options = spec.model_copy(update={"revision": None})  # all engines of `cached` have one revision
        engine = cached.engines.pop(options, None) or self._make(cached.loaded.model(spec))
        cached.engines[options] = engine  # the most recently used engine comes last
        if len(cached.engines) > _ENGINES:
            del cached.engines[next(iter(cached.engines))]
        return engine

    def _first_that_loads(self, specs: Sequence[ScoreSpec]) -> WeightsKey:
        """Load the model of the first of `specs` that can be loaded, and return its key in the cache.

        If none can be loaded, the first error is raised. A `WorkerError` is raised at once.
        """
        errors: list[SpecError] = []
        for spec in specs:
            try:
                return self._loaded(spec)
            except WorkerError:
                raise
            except SpecError as error:
                errors.append(error)
        raise errors[0]

    def _loaded(self, spec: ScoreSpec) -> WeightsKey:
        """Load a spec's model if it is not loaded or has new content; returns its key."""
        with one_line(spec):
            key, stamp = self._key(spec), {} if spec.revision else _stamp(spec)
        cached = self._cached.get(key)
        if cached is not None and not spec.revision and cached.stamp != stamp:
            if self._content(spec) == cached.loaded.revision:
                cached.stamp = stamp
            else:
                logger.info("the files of %s have changed, loading them beside the old ones", spec.model)
                # runs that have begun with the old files still need the old model
                old = (key[0], cached.loaded.revision, *key[2:])
                self._cached[old] = self._cached.pop(key)
                cached = None
        if cached is None:
            if spec.revision:
                self._content(spec)  # if the files are missing, this raises before another model is unloaded
            self._make_room(key)
            cached = self._cached[key] = _CachedModel(
                spec, self._load_beside(spec), stamp, system.monotonic()
            )
            self._update_metrics()
            self._bytes_of[key] = cached.loaded.backend.bytes
            self._make_room(key)  # once more, because the first load tells the model's size
        else:
            metrics.model_hits.inc()
        return key

    def warm(self, spec: ScoreSpec) -> None:
        """Load a model and score one row, so that the first request does not wait.

        A model that is loaded already scores no row, because another thread may be using it.

        Raises
        ------
        SpecError
            The model cannot be loaded. The error is a `WorkerError` if another worker may be able to load the
            model, for example because the memory of this worker does not suffice.
        DeviceLost
            The device failed.
        """
        try:
            loads = self._loads
            engine = self.get(spec)
            if self._loads > loads:
                engine.score(*columns_of([Probe("warm", "up")], spec.inputs))
        except (MemoryError, OutOfMemory):
            raise WorkerError(f"there is not enough memory to load model {spec.model}") from None

    def unload(self, model: str) -> int:
        """Wait until no engine is in use, then unload a model in all revisions and precisions.

        Returns how many were unloaded.
        """
        keys = [key for key in self._cached if key[0] == model]
        if keys:
            self._drain()
        for key in keys:
            logger.info("unloading %s", model)
            self._remove(key, metrics.model_unloads)
        return len(keys)

    def has(self, spec: ScoreSpec) -> bool:
        """Return whether the model of `spec` is loaded. If `spec` names no revision, the model's files must
        also be unchanged.
        """
        cached = self._cached.get(self._key(self._weights_of(spec)[0]))
        try:
            return cached is not None and (spec.revision is not None or cached.stamp == _stamp(spec))
        except (OSError, SpecError):  # `get` reports the error
            return False

    def evicts(self, spec: ScoreSpec) -> bool:
        """Return whether loading the model of `spec` would unload another model."""
        key = self._key(self._weights_of(spec)[0])
        return bool(self._cached) and key not in self._cached and self._too_much(key)

    def unload_idle(self, in_use: Callable[[], Set[Engine | None]] = frozenset) -> None:
        """Unload the models that were not used for the time in the settings.

        A model also counts as used now if `in_use` returns one of its engines, which means that the engine
        has work. If the settings name no time, `in_use` is not called, because it is slow with many claims.
        """
        if self._settings.model_idle_seconds is None:
            return
        since, engines = system.monotonic() - self._settings.model_idle_seconds, in_use()
        # do not loop over the models themselves: a variable would keep the weights in memory
        for key in [key for key, cached in self._cached.items() if cached.last_use(engines) < since]:
            logger.info("unloading %s, which is idle", key[0])
            self._remove(key, metrics.model_unloads)

    def _weights_of(self, spec: ScoreSpec) -> list[ScoreSpec]:
        """Return specs by which the weights for `spec` can be found or loaded, the best first.

        A spec that asks for tokens can use any loaded weights of its model. If none are loaded, there are
        several specs to try, because some models do not take pairs, and others need a prompt.
        """
        if spec.inputs != "tokens":
            return [spec]
        loaded = [cached.spec for key, cached in self._cached.items() if key[0] == spec.model]
        if loaded:
            return [loaded[-1].model_copy(update={"revision": spec.revision})]
        no_score = {"label": None, "all_labels": True, "activation": "default"}
        forms: list[dict[str, str]] = [{}, {"inputs": "conversations"}, {"prompt_template": TEXTS_ALONE}]
        return [spec.model_copy(update={"inputs": "pairs", **no_score, **form}) for form in forms]

    def _key(self, spec: ScoreSpec) -> WeightsKey:
        """Return the key of a spec's weights in the cache.

        Weights that were loaded for a spec without a revision have a key without a revision. A spec that
        names their revision gets the same key, so that the weights are not loaded again.
        """
        key = weights_key(spec)
        plain = (key[0], None, *key[2:])
        same = key not in self._cached and plain in self._cached
        return plain if same and self._cached[plain].loaded.revision == spec.revision else key

    def _load_beside(self, spec: ScoreSpec) -> Loaded:
        """Load the model of a spec.

        If memory is short, and the spec names no revision, first unload other revisions of the model, such as
        the one that was loaded before the model's files changed.
        """
        try:
            return self._load_timed(spec)
        except (MemoryError, OutOfMemory):
            older = [key for key in self._cached if key[0] == spec.model and key[1] and not spec.revision]
            if not older:
                raise
        self._drain()
        for key in older:
            self._remove(key, metrics.model_evictions)
        return self._load_timed(spec)

    def _make(self, model: Model) -> Engine:
        size = BatchSize.of(self._settings, model)
        return Engine(model, size, length_aware=self._settings.length_aware)

    def _content(self, spec: ScoreSpec) -> str | None:
        with one_line(spec):  # a network folder that is gone raises an `OSError`
            return directory_content(spec, cache_folder(self._settings.cache_dir))

    def _load_timed(self, spec: ScoreSpec) -> Loaded:
        self.loading, outcome = spec.model, "failed"
        try:
            with metrics.model_load_seconds.time():
                loaded = self._load(spec)
            self._loads += 1
            outcome = "loaded"
            return loaded
        finally:
            self.loading = None
            metrics.model_loads.labels(outcome).inc()

    def _make_room(self, key: WeightsKey) -> None:
        """Unload other models until the limits in the settings leave room for the model of `key`."""
        while any(other != key for other in self._cached) and self._too_much(key):
            self._drain()
            self._remove(next(other for other in self._cached if other != key), metrics.model_evictions)

    def _too_much(self, key: WeightsKey) -> bool:
        together = {loaded_key: cached.loaded.backend.bytes for loaded_key, cached in self._cached.items()}
        together.setdefault(key, self._bytes_of.get(key, 0))
        most = self._settings.model_cache_bytes
        too_many = len(together) > self._settings.model_cache_size
        return too_many or (most is not None and sum(together.values()) > most)

    def _remove(self, key: WeightsKey, counter: Counter) -> None:
        del self._cached[key]
        counter.inc()
        self._update_metrics()
        gc.collect()
        empty_cache(self._device)

    def _update_metrics(self) -> None:
        """Update the metrics that name the loaded models and the bytes of their weights. Other threads may
        read these metrics meanwhile.
        """
        metrics.model_bytes.set(self.bytes)
        shown: set[tuple[str, ...]] = set()
        for (model, *_), cached in self._cached.items():
            runner = cached.loaded.backend
            shown.add((model, cached.loaded.revision or "", runner.name, runner.device, runner.precision))
        for labels in shown:
            metrics.models.labels(*labels).set(1)
        for labels in self._shown - shown:
            metrics.models.remove(*labels)
        self._shown = shown


def _stamp(spec: ScoreSpec) -> Stamp:
    folder = model_folder(spec.model)
    try:
        return {} if folder is None else model_facts(folder)
    except OSError:  # for example, a file is being replaced; loading reports the error
        return {}
