"""Chooses the backend and the precision for a model on this machine, where the settings say ``auto``.

For a backend or a precision that the settings name, this module checks only whether it can run the model
here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from rankmill import plugins
from rankmill.jobs.contract.errors import ConfigError, WorkerError
from rankmill.workers.backends.base import DEVICES, BackendKind
from rankmill.workers.backends.speed import CPU_PRECISIONS, INT8, Combination, Speeds, cpu_speeds
from rankmill.workers.host.device import gpu_precision, resolve_device

logger = logging.getLogger(__name__)


@cache
def backends() -> dict[str, BackendKind]:
    """Return all installed backends by name, in the order in which ``auto`` prefers them.

    Raises
    ------
    ConfigError
        A backend cannot be imported, or its name differs from its entry point's name.
    """
    kinds: list[BackendKind] = []
    for name in plugins.names("rankmill.backends"):
        kinds.append(plugins.load("rankmill.backends", name))
        if kinds[-1].name != name:
            raise ConfigError(
                f"backend {name!r} calls itself {kinds[-1].name!r}; correct its package or uninstall it"
            )
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: (kind.preference, kind.name))}


@dataclass(frozen=True)
class BackendChoice:
    """The backend and the precision that run a model.

    ``int8_gain`` is the speed of int8 divided by that of ``precision``; ``None`` if it was not measured.
    """

    backend: str
    precision: str
    int8_gain: float | None = field(default=None, compare=False)


def choose_device(setting: str, backend: str) -> str:
    """Choose the device on which a backend runs models, by the setting ``device``.

    Raises
    ------
    ConfigError
        The device does not exist here. Or the setting is ``auto``, and `backend` is far slower than other
        backends on the device that ``auto`` finds here.
    """
    device = resolve_device(setting)
    if setting == "auto" and backend != "auto" and device in (kind := backends()[backend]).for_tests:
        wanted = " or ".join(DEVICES[name] for name in kind.precisions if name != device)
        raise ConfigError(
            f"backend {backend} finds no {wanted} here, and on a {DEVICES[device]} it is far slower than the "
            f"others; use --backend auto, or set device: {device} to use it anyway"
        )
    return device


def choose_backend(
    setting: str,
    precision: str,
    config: Any,
    device: str,
    cache: Path,
    *,
    plain: bool = True,
    without: Collection[Combination] = (),
    alone: bool = False,
) -> BackendChoice:
    """Choose the backend and the precision that run a model on this machine.

    The precision ``auto`` never means int8. On a CPU, ``auto`` chooses the fastest backend and precision. On
    a GPU, it chooses the first of `backends` that can run the model in bf16 or fp16, and fp32 as the last
    resort.

    There are several kinds of int8, such as ``int8-64`` and ``int8-128``. If their speeds can be measured,
    the precision ``int8`` means a kind that is clearly faster than the choice of ``auto``. If no kind is
    clearly faster, the choice of ``auto`` is returned. If the speeds cannot be measured, ``int8`` means the
    backend's first kind.

    Parameters
    ----------
    setting
        ``auto`` or a key of `backends`.
    precision
        ``auto`` or a precision.
    config
        The model's config, from transformers.
    device
        ``cpu``, ``cuda`` or ``mps``.
    cache
        Cache folder, for the measured speeds.
    plain
        Whether the model is a sequence classifier of transformers with one output.
    without
        Pairs of backend and precision that are not to be used, because they score this model wrongly or
        cannot run it.
    alone
        Whether the model is to be deterministic. The kind of int8 then does not depend on measured speeds.

    Raises
    ------
    WorkerError
        No backend can run this model here with these settings.
    """
    choose = partial(
        _choose, setting, config=config, device=device, cache=cache, plain=plain, without=without
    )
    chosen = choose(precision)
    kind = backends()[chosen.backend]
    if (
        precision != "int8"
        or alone
        or not set(INT8) & set(kind.timed)
        or not kind.is_measured(config, plain=plain)
    ):
        return chosen
    exact = choose("auto")
    speeds = _speeds([(chosen.backend, ""), (exact.backend, "")], config, cache)
    int8_kind = speeds.int8(chosen.backend, (exact.backend, exact.precision), without)
    if int8_kind is None:
        logger.warning(
            "int8 is not worth it on this CPU: %s of %s is used (%s); to have it anyway, name a kind: %s",
            exact.precision, exact.backend, speeds, _either(list(INT8)),
        )  # fmt: skip
        return BackendChoice(exact.backend, exact.precision)
    return BackendChoice(chosen.backend, int8_kind)


def _choose(
    setting: str,
    precision: str,
    *,
    config: Any,
    device: str,
    cache: Path,
    plain: bool,
    without: Collection[Combination],
) -> BackendChoice:
    """Choose a backend and a precision. Here ``int8`` means the backend's first kind of int8."""
    kinds = _automatic(device) if setting == "auto" else [backends()[setting]]
    obstacles: dict[str, str] = {}
    able: list[Combination] = []
    for kind in kinds:
        supported = kind.precisions.get(device, ())
        if precision not in {"auto", *supported} and (supported or setting == "auto"):
            continue
        obstacle = kind.obstacle(config, device, precision, plain=plain)
        if obstacle is None:
            mine = [(kind.name, allowed) for allowed in _precisions(precision, device, kind)]
            able += [choice for choice in mine if choice not in without]
            if unfit := [choice[1] for choice in mine if choice in without]:
                obstacles[kind.name] = f"it has no right scores of the model in {_either(unfit)}"
        else:
            obstacles[kind.name] = obstacle
    measured = [choice for choice in able if backends()[choice[0]].is_measured(config, plain=plain)]
    able = measured or able
    able.sort(key=lambda choice: device != "cpu" and choice[1] == "fp32")  # on a GPU, fp32 is the last resort
    if able:
        backend, chosen = _fastest(able, config, device, cache)
        names = list(backends())
        better = {name: obstacles[name] for name in names[: names.index(backend)] if name in obstacles}
        if better:
            logger.info("backend %s, not %s", backend, _listed(better))
        if precision != "auto" or not plain:
            return BackendChoice(backend, chosen)
        return BackendChoice(backend, chosen, _int8_gain(able, (backend, chosen), config, device, cache))
    if not obstacles:
        supported_here = dict.fromkeys(name for kind in kinds for name in kind.precisions[device])
        by = "" if setting == "auto" else f" by backend {setting}"
        raise WorkerError(
            f"precision {precision} is not supported on {device}{by}; use {_either(list(supported_here))}"
        )
    way_out = "use another precision" if setting in {"auto", "torch"} else "use --backend torch"
    subject = "backend" if setting != "auto" else f"precision {precision} has no backend here:"
    raise WorkerError(f"{subject} {_listed(obstacles, ' cannot be used')}; {way_out}")


def _precisions(precision: str, device: str, kind: BackendKind) -> list[str]:
    """Return the precisions that the setting `precision` allows for a backend on a device."""
    supported = kind.precisions.get(device, ())
    if precision == "int8":
        return list(kind.int8())
    if precision != "auto":
        return [precision]
    if device != "cpu":
        return list(dict.fromkeys([gpu_precision(device, supported), "fp32"]))
    return [name for name in CPU_PRECISIONS if name in supported]


def _fastest(able: list[Combination], config: Any, device: str, cache: Path) -> Combination:
    """Return the fastest combination of backend and precision, or the first one if no speed is measured."""
    if device != "cpu" or len(able) == 1 or any(precision not in CPU_PRECISIONS for _, precision in able):
        return able[0]
    return _speeds(able, config, cache).fastest(able) or able[0]


def _int8_gain(
    able: list[Combination], chosen: Combination, config: Any, device: str, cache: Path
) -> float | None:
    """Return the speed of int8 divided by that of the chosen precision; ``None`` if this is unknown."""
    kinds = [backends()[name] for name, _ in able]
    known = any(set(INT8) & set(kind.timed) and kind.is_measured(config) for kind in kinds)
    return _speeds(able, config, cache).int8_gain(chosen) if known and device == "cpu" else None


def _speeds(able: list[Combination], config: Any, cache: Path) -> Speeds:
    return cpu_speeds([backends()[name] for name in dict.fromkeys(name for name, _ in able)], config, cache)


def _automatic(device: str) -> list[BackendKind]:
    return [
        kind for kind in backends().values() if device in kind.precisions and device not in kind.for_tests
    ]


def _listed(obstacles: dict[str, str], verb: str = "") -> str:
    return "; ".join(f"{name}{verb}: {obstacle}" for name, obstacle in obstacles.items())


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
