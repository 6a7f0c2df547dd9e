"""The devices of this machine: which one ``auto`` means, what it is good at, and calls of its own.

Nothing else asks PyTorch about devices, so nothing touches one before a worker uses it.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from jobs.errors import ConfigError
from jobs.runtime.hosts import CLAIM_AHEAD, TOKEN_BUDGETS, cores, cpu_name


def resolve_device(setting: str) -> str:
    """``auto``: CUDA, then MPS, then CPU.

    Raises
    ------
    ConfigError
        The device asked for is not there.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if setting == "auto":
        return next(device for device, there in present.items() if there)
    if not present[setting]:
        raise ConfigError(f"device {setting} is not available on this machine; use one of {_names(present)}")
    return setting


def native_precision(device: str, supported: Sequence[str]) -> str:
    """The fastest of some precisions: bf16 where the hardware has it, fp16 on other GPUs, else fp32."""
    if device == "cpu":
        best = "bf16" if _cpu_has_bf16() else "fp32"
    elif device == "cuda":
        best = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    else:
        best = "fp16"
    return next(precision for precision in (best, "fp16", "fp32") if precision in supported)


def resolve_token_budget(setting: int | str, device: str) -> int:
    """``auto`` is the device's of `TOKEN_BUDGETS`."""
    return setting if isinstance(setting, int) else TOKEN_BUDGETS[device]


def resolve_claim_ahead(setting: int | str, device: str) -> int:
    """``auto`` is the device's of `CLAIM_AHEAD`."""
    return setting if isinstance(setting, int) else CLAIM_AHEAD[device]


def use_threads(setting: str | int) -> None:
    """Set the CPU threads of this process; ``auto`` is the cores it may run on."""
    torch.set_num_threads(setting if isinstance(setting, int) else cores())


def device_name(device: str) -> str:
    """What the hardware is called, where that can be told."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return cpu_name()


def int8_instructions() -> str:
    """What this CPU multiplies 8-bit numbers with: ``vnni``, ``arm64``, or ``avx2``, whose sums overflow."""
    if platform.machine() in {"aarch64", "arm64"}:
        return "arm64"
    found = torch.cpu.get_capabilities()
    return "vnni" if found.get("avx512_vnni") or found.get("avx_vnni") else "avx2"


def empty_cache(device: str) -> None:
    """Give memory that PyTorch keeps for later back to the device."""
    if device == "cuda":
        torch.cuda.empty_cache()
    elif device == "mps":
        torch.mps.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether that is what an error of PyTorch says; only CUDA has an error type for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in ("can't allocate memory", "MPS backend out of memory"))


def _cpu_has_bf16() -> bool:
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def _names(present: dict[str, bool]) -> str:
    return ", ".join(device for device, there in present.items() if there)
