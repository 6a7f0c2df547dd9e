"""Which backend and precision ``auto`` means for a model, and whether those asked for can run it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jobs.errors import ConfigError, SpecError
from jobs.runtime.hosts import FOR_TESTS
from workers.backends.base import DEVICES, BackendKind
from workers.device import native_precision, resolve_device

logger = logging.getLogger(__name__)

_NAMES = ("openvino", "torch", "onnx", "mlx")  # a package beside this module each; auto prefers the first

BACKENDS: dict[str, BackendKind] = {
    name: import_module(f"workers.backends.{name}").KIND for name in _NAMES
}  # fmt: skip
"""All backends, by name."""


@dataclass(frozen=True)
class Choice:
    """What runs the model, and in which precision."""

    backend: str
    precision: str


def choose_device(setting: str, backend: str) -> str:
    """The device that a setting means for a backend.

    Raises
    ------
    ConfigError
        The device asked for is not there, or ``auto`` finds one where the backend is for tests alone.
    """
    device = resolve_device(setting)
    if setting == "auto" and (backend, device) in FOR_TESTS:
        wanted = " or ".join(DEVICES[each] for each in BACKENDS[backend].precisions if each != device)
        raise ConfigError(
            f"backend {backend} finds no {wanted} here, and on a {DEVICES[device]} it is far slower than the "
            f"others; use --backend auto, or set device: {device} to have it all the same"
        )
    return device


def choose_backend(setting: str, precision: str, config: Any, device: str) -> Choice:
    """The backend and precision for a model; where ``auto`` is asked for, the first that can run it.

    Parameters
    ----------
    setting
        ``auto`` or a key of `BACKENDS`.
    precision
        ``auto`` or a precision.
    config
        The model's, from transformers.
    device
        ``cpu``, ``cuda`` or ``mps``.

    Raises
    ------
    SpecError
        What is asked for cannot run this model here.
    """
    kinds = _automatic(device) if setting == "auto" else [BACKENDS[setting]]
    obstacles: dict[str, str] = {}
    for kind in kinds:
        supported = kind.precisions.get(device, ())
        if precision not in {"auto", *supported} and (supported or setting == "auto"):
            continue
        obstacle = kind.obstacle(config, device, precision)
        if obstacle is None:
            if obstacles:
                logger.info("backend %s, not %s", kind.name, _listed(obstacles))
            return Choice(
                kind.name, native_precision(device, supported) if precision == "auto" else precision
            )
        obstacles[kind.name] = obstacle
    if not obstacles:
        known = dict.fromkeys(each for kind in kinds for each in kind.precisions[device])
        by = "" if setting == "auto" else f" by backend {setting}"
        raise SpecError(f"precision {precision} is not supported on {device}{by}; use {_either(list(known))}")
    way_out = "--backend torch does without it" if setting != "auto" else "use another precision"
    what = "backend" if setting != "auto" else f"precision {precision} has no backend here:"
    raise SpecError(f"{what} {_listed(obstacles, ' cannot be used')}; {way_out}")


def _automatic(device: str) -> list[BackendKind]:
    """What ``auto`` tries on a device, the fastest first."""
    kinds = [kind for kind in BACKENDS.values() if device in kind.precisions]
    return [kind for kind in kinds if (kind.name, device) not in FOR_TESTS]


def _listed(obstacles: dict[str, str], verb: str = "") -> str:
    return "; ".join(f"{name}{verb}: {obstacle}" for name, obstacle in obstacles.items())


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
