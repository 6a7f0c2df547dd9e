"""The devices of this machine: which one ``auto`` means, what it is good at, and calls of its own.

Nothing else asks PyTorch about devices, so nothing touches one before a worker uses it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from jobs.errors import ConfigError

TOKEN_BUDGETS = {"cpu": 2048, "cuda": 65_536, "mps": 16_384}
"""Padded tokens in a batch, where nothing else is asked for."""

CLAIM_AHEAD = {"cpu": 1024, "cuda": 32_768, "mps": 8_192}
"""Pairs a worker holds before it claims no more, where nothing else is asked for."""


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
    """``auto``: enough tokens to keep the device busy, few enough to pad little (and fit caches)."""
    return setting if isinstance(setting, int) else TOKEN_BUDGETS[device]


def resolve_claim_ahead(setting: int | str, device: str) -> int:
    """``auto``: enough pairs that the forward never waits, few enough that others get theirs."""
    return setting if isinstance(setting, int) else CLAIM_AHEAD[device]


def use_threads(setting: str | int) -> None:
    """Set the CPU threads of this process; ``auto`` is the cores it may run on."""
    threads = (
        len(os.sched_getaffinity(0)) if setting == "auto" and hasattr(os, "sched_getaffinity") else setting
    )
    torch.set_num_threads(threads if isinstance(threads, int) else os.cpu_count() or 1)


def device_name(device: str) -> str:
    """What the hardware is called, where that can be told."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


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
