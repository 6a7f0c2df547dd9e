"""Measures and caches how fast each backend and precision is on this CPU; a CPU's flags do not tell this.

The measurement times a layer of the model's shape in the backend's own arithmetic, on all threads of the
worker. An error here never stops a worker from scoring: a combination that cannot be measured is not chosen.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankmill.jobs.cache import read_json
from rankmill.jobs.runtime.hosts import cpu_flags, cpu_name
from rankmill.jobs.system import system
from rankmill.workers.backends.base import BackendKind, LayerShape
from rankmill.workers.host.device import forced_kernels, threads
from rankmill.workers.host.disk_cache import digest, try_to_keep, version

CPU_PRECISIONS = ("fp32", "bf16")
"""On a CPU, the setting ``auto`` chooses from these precisions. The most exact one is first."""

INT8: Mapping[str, tuple[int, str]] = {
    "int8-64": (64, "fp32"),
    "int8-64-bf16": (64, "bf16"),
    "int8-128": (128, "fp32"),
    "int8-128-bf16": (128, "bf16"),
}
"""Kinds of int8, the most exact first. Each kind has the number of values that share a scale (a group), and
the precision of everything that is not in 8 bits. Larger groups would be no faster and rank worse; groups of
32 would be too slow.
"""

_WORTH_INT8 = 1.15
"""int8 is used only if it is this many times as fast as the choice of ``auto``, because int8 ranks worse than
bf16.
"""

_VERSION = 4
"""Version of the speed measurement. It changes when the same machine would get other speeds."""

_SECONDS = 0.2
_ROUNDS = 3
_MOST_ROUNDS = 20
"""To measure speeds, each backend runs a layer once in a round, in each precision. There are `_ROUNDS`
rounds, and more until `_SECONDS` are over or `_MOST_ROUNDS` are done.
"""

_PAUSE = 0.001
"""Pause in seconds before a layer is timed, so that threads of the previous layer have stopped spinning."""

_TIE = 1.05
"""Speeds that differ by no more than this factor count as equal."""

Combination = tuple[str, str]
"""The name of a backend, and a precision in which it runs models."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speeds:
    """Measured speeds, in billions of operations per second and thread, for each backend and precision."""

    gflops: Mapping[Combination, float]

    def fastest(self, among: Iterable[Combination]) -> Combination | None:
        """Return the fastest of the backends and precisions in `among`, or ``None`` if none was measured.

        If several are about equally fast, return the most exact one.
        """
        measured = [choice for choice in among if choice in self.gflops]
        enough = max((self.gflops[choice] for choice in measured), default=0.0) / _TIE
        good = [choice for choice in measured if self.gflops[choice] >= enough]
        return min(good, key=lambda choice: CPU_PRECISIONS.index(choice[1]), default=None)

    def int8(self, backend: str, over: Combination, without: Collection[Combination] = ()) -> str | None:
        """Choose the kind of int8 for `backend`, or return ``None`` if no measured kind is fast enough.

        Among the kinds that are fast enough, those with the smallest groups are the most exact. The fastest
        of the most exact kinds is chosen.

        Parameters
        ----------
        backend
            Name of the backend.
        over
            A kind is fast enough if it is clearly faster than this backend and precision.
        without
            Pairs of backend and precision that are not to be used.
        """
        enough = _WORTH_INT8 * self.gflops.get(over, math.inf)
        speeds = {
            kind: self.gflops.get((backend, kind), 0.0) for kind in INT8 if (backend, kind) not in without
        }
        good = [kind for kind, speed in speeds.items() if speed >= enough]
        finest = [kind for kind in good if INT8[kind][0] == min(INT8[other][0] for other in good)]
        return max(finest, key=lambda kind: speeds[kind], default=None)

    def int8_gain(self, over: Combination) -> float | None:
        """Return the speed of int8 divided by the speed of `over`, a backend and precision.

        If one of the two speeds was not measured, return ``None``.
        """
        int8_speeds = {choice: speed for choice, speed in self.gflops.items() if choice[1] in INT8}
        if not int8_speeds or not self.gflops.get(over):
            return None
        chosen = [(name, kind) for name, _ in int8_speeds if (kind := self.int8(name, over))]
        return max(int8_speeds[choice] for choice in chosen or int8_speeds) / self.gflops[over]

    def __str__(self) -> str:
        figures = [f"{name} {precision} {speed:.0f}" for (name, precision), speed in self.gflops.items()]
        return f"{', '.join(figures) or 'none'} GFLOP/s per thread"


_known: dict[Path, Speeds] = {}


def cpu_speeds(kinds: Iterable[BackendKind], config: Any, cache: Path) -> Speeds:
    """Return how fast backends run a layer of a model's shape on this CPU, from the cache or measured now.

    Parameters
    ----------
    kinds
        The installed backends; those without a `timed_layer` are left out.
    config
        The model's config, from transformers.
    cache
        Cache folder; if it is not writable, each worker measures for itself.
    """
    kinds = [kind for kind in kinds if kind.timed_layer]
    shape = LayerShape.of(config, threads())
    inputs = _about(kinds, shape)
    file = cache / "speeds" / f"{digest(inputs)}.json"
    if file not in _known:
        _known[file] = _cached(file) or _measured(kinds, shape, inputs, file)
    return _known[file]


def _about(kinds: Iterable[BackendKind], shape: LayerShape) -> dict[str, Any]:
    """Return everything on which measured speeds depend. The digest of the result is the key of the speeds in
    the cache, so that a speed is not used on other machines.
    """
    return {
        "recipe": _VERSION,
        "cpu": cpu_name(),
        "flags": digest(sorted(cpu_flags())),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": threads(),
        "forced": forced_kernels(),
        "packages": {kind.name: [f"{name} {version(name)}" for name in kind.packages] for kind in kinds},
        "layer": asdict(shape),
    }


def _cached(file: Path) -> Speeds | None:
    gflops: dict[Combination, float] = {}
    try:
        for name, speed in read_json(file)["gflops"].items():
            backend, precision = name.split(" ", 1)
            gflops[backend, precision] = float(speed)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    logger.info("speed of this CPU, as measured before: %s", Speeds(gflops))
    return Speeds(gflops)


def _measured(kinds: Iterable[BackendKind], shape: LayerShape, inputs: dict[str, Any], file: Path) -> Speeds:
    started = system.monotonic()
    speeds = measure(_layers(kinds, shape), shape.operations)
    logger.info(
        "speed of this CPU, measured in %.1f s with %d threads and layers of %d and %d: %s",
        system.monotonic() - started, threads(), shape.hidden, shape.inner, speeds,
    )  # fmt: skip
    if speeds.gflops:
        gflops = {" ".join(choice): round(speed, 1) for choice, speed in speeds.gflops.items()}
        try_to_keep(file, {**inputs, "gflops": gflops}, "the speed of this CPU")
    return speeds


def _layers(kinds: Iterable[BackendKind], shape: LayerShape) -> dict[Combination, Callable[[], object]]:
    layers = {}
    for kind in kinds:
        for precision in kind.timed:
            supported = precision in kind.precisions["cpu"]
            try:
                if kind.timed_layer is not None and supported and kind.lacks("cpu", precision) is None:
                    layers[kind.name, precision] = kind.timed_layer(shape, precision)
            except Exception as error:
                logger.warning("cannot measure %s in %s: %s", kind.name, precision, error)
    return layers


def measure(
    layers: Mapping[Combination, Callable[[], object]],
    operations: float,
    clock: Callable[[], float] = time.process_time,
) -> Speeds:
    """Measure the speed of layers by running each layer in every round. A layer's fastest round counts.

    Parameters
    ----------
    layers
        For each backend and precision a function that runs a layer once. A backend and precision whose
        function raises is left out.
    operations
        Number of floating-point operations in one run of a layer.
    clock
        A clock in seconds; by default the CPU time of all threads, so that a busy machine or a CPU quota
        hardly matters.
    """
    seconds: dict[Combination, list[float]] = {choice: [] for choice in layers}
    deadline = system.monotonic() + _SECONDS
    for number in range(_MOST_ROUNDS + 1):  # the first round warms up and does not count
        for choice in list(seconds):
            system.sleep(_PAUSE)
            started = clock()
            try:
                layers[choice]()
            except Exception as error:
                logger.warning("cannot measure %s in %s: %s", *choice, error)
                del seconds[choice]
                continue
            if number:
                seconds[choice].append(clock() - started)
        if number >= _ROUNDS and system.monotonic() > deadline:
            break
    best = {choice: max(min(taken), 1e-9) for choice, taken in seconds.items()}
    return Speeds({choice: operations / taken / 1e9 for choice, taken in best.items()})
