"""Which device and which precision ``auto`` means on this machine."""

from __future__ import annotations

import os

import torch

from jobs.errors import ConfigError, SpecError

SUPPORTED = {
    "cpu": ("fp32", "bf16"),
    "cuda": ("fp32", "fp16", "bf16"),
    "mps": ("fp32", "fp16"),
}
"""Precisions of each device, for the torch backend."""

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


def resolve_precision(setting: str, device: str) -> str:
    """``auto``: bf16 where the hardware has it, fp16 on MPS and older GPUs, else fp32.

    Raises
    ------
    SpecError
        The device does not support the precision asked for.
    """
    if setting == "auto":
        if device == "cpu":
            return "bf16" if _cpu_has_bf16() else "fp32"
        if device == "cuda":
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        return "fp16"
    if setting not in SUPPORTED[device]:
        raise SpecError(
            f"precision {setting} is not supported on {device}; use {' or '.join(SUPPORTED[device])}"
        )
    return setting


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


def _cpu_has_bf16() -> bool:
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def _names(present: dict[str, bool]) -> str:
    return ", ".join(device for device, there in present.items() if there)
