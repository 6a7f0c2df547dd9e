"""Finds the devices of this machine and the one that ``auto`` means, and chooses defaults for the device.

Until a model is loaded, only this module asks PyTorch about devices, so a device is not touched before a
worker uses it. On machines without a GPU this module does not import PyTorch, because some workers can do
without PyTorch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from functools import cache

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.hosts import CLAIM_AHEAD, cpu_flags, cpu_name, may_have_gpu, thread_environ
from rankmill.jobs.runtime.limits import cores


def resolve_device(setting: str) -> str:
    """Resolve the setting ``device``; ``auto`` means CUDA if present, else MPS, else the CPU.

    Raises
    ------
    ConfigError
        The requested device is not available.
    """
    present = devices() if setting != "cpu" else ["cpu"]
    if setting == "auto":
        return present[0]
    if setting not in present:
        raise ConfigError(
            f"device {setting} is not available on this machine; use one of {', '.join(present)}"
        )
    return setting


def devices() -> list[str]:
    """The kinds of devices of this machine; the first is what ``auto`` means."""
    if not may_have_gpu():
        return ["cpu"]
    import torch

    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [device for device, is_present in present.items() if is_present]


def gpu_precision(device: str, supported: Sequence[str]) -> str:
    """The best supported precision on a GPU: bf16 (CUDA with support in hardware), else fp16, else fp32."""
    best = "fp16"
    if device == "cuda":
        import torch

        best = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return next(precision for precision in (best, "fp16", "fp32") if precision in supported)


def has_fp8() -> bool:
    """Whether the GPU is from NVIDIA and multiplies 8-bit floating point (Ada, Hopper or later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def resolve_claim_ahead(setting: int | str, device: str) -> int:
    """Return how many pairs a worker claims ahead; ``auto`` means the device's value in `CLAIM_AHEAD`."""
    return setting if isinstance(setting, int) else CLAIM_AHEAD[device]


def use_threads(setting: str | int) -> None:
    """Set how many CPU threads this process's forwards use; ``auto`` means all cores available to it."""
    count = setting if isinstance(setting, int) else cores()
    os.environ.update(thread_environ(count))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)


def threads() -> int:
    """The number of CPU threads of a forward, which `use_threads` has set."""
    count = os.environ.get("OMP_NUM_THREADS", "")
    return int(count) if count.isdecimal() else cores()


@cache
def device_name(device: str) -> str:
    """Name of the GPU for CUDA, and of the CPU for other devices."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return cpu_name()


_CHOOSE_KERNELS = (
    "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OV_CPU_MAX_ISA",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
"""Environment variables that make libraries choose kernels other than the usual kernels of the device."""


def forced_kernels() -> list[str]:
    """The environment variables of `_CHOOSE_KERNELS` that are set, as ``NAME=VALUE``."""
    return [f"{name}={os.environ[name]}" for name in _CHOOSE_KERNELS if os.environ.get(name)]


def int8_overflows() -> bool:
    """Whether sums of 8-bit products can overflow on this CPU, as on x86 CPUs without VNNI."""
    is_arm = platform.machine() in {"aarch64", "arm64"}
    return not is_arm and not cpu_flags() & {"avx512_vnni", "avx_vnni"}


def empty_cache(device: str) -> None:
    """Give the device back the memory that PyTorch keeps in its cache."""
    if device == "cpu":
        return
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
    elif device == "mps":
        torch.mps.empty_cache()
