"""The models a worker keeps loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from jobs.spec import ScoreSpec
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
        What runs the models: ``auto``, or one of those in `workers.backends.choice`.
    """

    def __init__(
        self,
        device: str,
        size: int,
        token_budget: int,
        drain: Callable[[], None],
        backend: str,
    ) -> None:
        self._device = device
        self._size = size
        self._token_budget = token_budget
        self._drain = drain
        self._backend = backend
        self._engines: OrderedDict[ScoreSpec, Engine] = OrderedDict()

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
            self._engines[spec] = Engine(load_model(spec, self._device, self._backend), self._token_budget)
        self._engines.move_to_end(spec)
        return self._engines[spec]
