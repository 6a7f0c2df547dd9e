"""Makes the parts of a worker (device, engines, pipeline) from its settings.

Imported only in the process that will use the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rankmill.jobs.cache.folder import cache_folder, strangers
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.backends.registry import choose_device
from rankmill.workers.engine.budget import BudgetSearch
from rankmill.workers.engine.cache import EngineCache, Limits
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.headroom import Headroom, memory_of
from rankmill.workers.engine.pipeline import Pipeline
from rankmill.workers.host.device import resolve_claim_ahead, resolve_token_budget, use_threads
from rankmill.workers.models.loading import Model, load
from rankmill.workers.models.sources import Reading, directory_content
from rankmill.workers.models.versions import Aliases, VersionStore
from rankmill.workers.queue.chunks import ChunkScorer


@dataclass(frozen=True)
class Parts:
    """The parts of a worker: its device and the objects that score on it; ``claim_ahead`` is in pairs.

    ``spec`` gives the score spec with which a model is loaded before chunks need it.
    """

    device: str
    claim_ahead: int
    engines: EngineCache
    scorer: ChunkScorer
    pipeline: Pipeline
    spec: Callable[[str], ScoreSpec]


def prepare_device(settings: WorkerSettings) -> str:
    """Set the number of threads, and choose the device.

    Raises
    ------
    RankmillError
        The device is not available, or the backend does not run on it.
    """
    use_threads(settings.threads)
    return choose_device(settings.device, settings.backend)


def assemble(
    settings: WorkerSettings, device: str, store: RunStore, worker: str, drain: Callable[[], None]
) -> Parts:
    """Make the worker's parts.

    Parameters
    ----------
    settings, device, store, worker
        The worker's settings, its device (from `prepare_device`), its run store and its name.
    drain
        Waits until no engine is in use.

    Raises
    ------
    ConfigError
        Strangers can write to the cache folder.
    """
    cache = cache_folder(settings.cache_dir)
    if why := strangers(cache):
        raise ConfigError(f"cache_dir: {why}")
    versions = VersionStore(cache, settings.registry, settings.cache_bytes)
    aliases = Aliases(settings.registry)
    engines = EngineCache(
        partial(
            load, device=device, backend=settings.backend, cache_dir=settings.cache_dir, versions=versions
        ),
        device,
        Limits(settings.model_cache_size, settings.model_cache_bytes, settings.model_idle_seconds),
        partial(_engine, settings),
        drain,
        partial(directory_content, cache=cache),
    )
    return Parts(
        device=device,
        claim_ahead=resolve_claim_ahead(settings.claim_ahead, device),
        engines=engines,
        scorer=ChunkScorer(store, engines, worker, aliases, Reading(cache, versions)),
        spec=lambda model: aliases.pinned(settings.spec(model)),
        pipeline=Pipeline(settings.batch_wait_ms / 1000),
    )


def _engine(settings: WorkerSettings, model: Model) -> Engine:
    """An engine; it searches its token budget itself unless the settings fix the size of batches."""
    token_budget = resolve_token_budget(settings.token_budget, model.backend.device)
    max_batch = settings.max_batch if isinstance(settings.max_batch, int) else None
    search = None
    if is_auto := not isinstance(settings.token_budget, int) and max_batch is None:
        search = BudgetSearch(model.backend, model.name, token_budget, cache_folder(settings.cache_dir))
        token_budget = search.start
    return Engine(
        model,
        token_budget,
        max_batch=max_batch,
        length_aware=settings.length_aware,
        search=search,
        headroom=Headroom(memory_of(model.backend.device)),
        short_batches=is_auto,
    )
