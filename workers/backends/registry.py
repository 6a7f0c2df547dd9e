"""Which backend and precision ``auto`` means for a model, and whether those asked for can run it."""

from __future__ import annotations

import importlib.util
import logging
import platform
from dataclasses import dataclass
from typing import Any

from jobs.errors import ConfigError, SpecError
from workers.backends.first_token import reads_first_token
from workers.device import native_precision, resolve_device

logger = logging.getLogger(__name__)

PRECISIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "fp16", "bf16"), "mps": ("fp32", "fp16")},
    "openvino": {"cpu": ("fp32", "bf16", "int8")},
    "onnx": {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16")},
    "mlx": dict.fromkeys(("cpu", "mps"), ("fp32", "fp16", "bf16", "int8", "int4")),
}
"""What each backend runs, by device."""

AUTO = {"cpu": ("openvino", "torch", "onnx"), "cuda": ("torch", "onnx"), "mps": ("torch", "mlx")}
"""What ``auto`` tries on each device, the fastest first; MLX on a CPU is for tests."""


@dataclass(frozen=True)
class Choice:
    """What runs the model, and in which precision."""

    backend: str
    precision: str


def choose_device(setting: str, backend: str) -> str:
    """The device that a setting means for a backend: MLX has a CPU only where the setting says so.

    Raises
    ------
    ConfigError
        The device asked for is not there, or nobody would want the backend on what is.
    """
    device = resolve_device(setting)
    if (setting, backend, device) == ("auto", "mlx", "cpu"):
        raise ConfigError(
            "backend mlx finds no Apple GPU here, and on a CPU it is far slower than the others; "
            "use --backend auto, or set device: cpu to have it all the same"
        )
    return device


def choose_backend(setting: str, precision: str, config: Any, device: str) -> Choice:
    """The backend and precision for a model; where ``auto`` is asked for, the first that can run it.

    Parameters
    ----------
    setting
        ``auto`` or a key of `PRECISIONS`.
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
    names = AUTO[device] if setting == "auto" else (setting,)
    obstacles: dict[str, str] = {}
    for name in names:
        supported = PRECISIONS[name].get(device, ())
        if precision not in {"auto", *supported} and (supported or setting == "auto"):
            continue
        obstacle = _obstacle(name, precision, config, device)
        if obstacle is None:
            if obstacles:
                logger.info("backend %s, not %s", name, _listed(obstacles))
            return Choice(name, native_precision(device, supported) if precision == "auto" else precision)
        obstacles[name] = obstacle
    if not obstacles:
        known = dict.fromkeys(each for name in names for each in PRECISIONS[name][device])
        by = "" if setting == "auto" else f" by backend {setting}"
        raise SpecError(f"precision {precision} is not supported on {device}{by}; use {_either(list(known))}")
    way_out = "--backend torch does without it" if setting != "auto" else "use another precision"
    what = "backend" if setting != "auto" else f"precision {precision} has no backend here:"
    raise SpecError(f"{what} {_listed(obstacles, ' cannot be used')}; {way_out}")


def _obstacle(backend: str, precision: str, config: Any, device: str) -> str | None:
    """What keeps a backend from running the model in this precision on this device."""
    if backend == "torch":
        return None
    if device not in PRECISIONS[backend]:
        return f"it runs on {_places(backend)}, not on {device}"
    missing = _missing(backend, device)
    if missing is None and (backend, precision) == ("openvino", "int8") and not _installed("nncf"):
        return "int8 needs NNCF (pip install rankmill[openvino-int8])"
    if missing is None and not reads_first_token(config):
        return f"it is not known to score {config.model_type} models as PyTorch does"
    return missing


def _missing(backend: str, device: str) -> str | None:
    """What this machine lacks for a backend."""
    if backend == "openvino" and platform.machine() not in {"x86_64", "AMD64"}:
        return f"it is for x86 CPUs, not for {platform.machine()}"
    if not all(_installed(package) for package in _PACKAGES[backend]):
        return f"it is not installed (pip install rankmill[{backend}])"
    if backend == "onnx" and device == "cuda" and not _onnx_runs_on_cuda():
        return "it is ONNX Runtime's build for CPUs (pip install onnxruntime-gpu instead of onnxruntime)"
    return None


_PACKAGES = {"openvino": ("openvino",), "onnx": ("onnx", "onnxruntime"), "mlx": ("mlx",)}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _onnx_runs_on_cuda() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def _places(backend: str) -> str:
    names = {"cpu": "CPUs", "cuda": "NVIDIA GPUs", "mps": "Apple GPUs"}
    return " and ".join(names[device] for device in PRECISIONS[backend])


def _listed(obstacles: dict[str, str], verb: str = "") -> str:
    return "; ".join(f"{name}{verb}: {obstacle}" for name, obstacle in obstacles.items())


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
