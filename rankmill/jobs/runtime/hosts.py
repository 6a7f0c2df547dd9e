"""Facts about devices and this host, found without PyTorch, for workers and the code that starts them."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path

from rankmill.jobs.runtime.installation import require_packages

TOKEN_BUDGETS = {"cpu": 2048, "cuda": 65_536, "mps": 16_384}
"""By device, the largest number of padded tokens in a batch. The worker uses this number until it finds a
better one.

With fewer tokens, the device may be idle. With more, batches have more padding, and the CPU's caches may be
too small.
"""

CLAIM_AHEAD = {"cpu": 2048, "cuda": 32_768, "mps": 8_192}
"""By device, the number of pairs that a worker claims ahead.

With fewer pairs, the device may have to wait for work. With more, other workers may get too few jobs.
"""

_GPU_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Paths that exist on Linux if a program can reach a GPU: NVIDIA (two), Jetson, WSL, AMD."""


SUPERVISED = "RANKMILL_SUPERVISED"
"""Environment variable that marks a worker which a parent process keeps running.

The parent holds the other end of the worker's standard input, so the worker notices when the parent ends.
"""

WORKER_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
"""Packages that workers import and that the extra ``worker`` installs."""


def require_worker_packages(*more: str) -> None:
    """Check that the packages of a worker are installed.

    Parameters
    ----------
    more
        Packages that are needed in addition to `WORKER_PACKAGES`.

    Raises
    ------
    ConfigError
        A package is missing; the extra ``worker`` installs `WORKER_PACKAGES`.
    """
    instead = ", or use workers elsewhere with --redis URL"
    require_packages((*WORKER_PACKAGES, *more), "worker", "scoring on this host", instead)


def thread_environ(threads: int) -> dict[str, str]:
    """Return environment variables that limit a process to this many CPU threads.

    Set the variables before the process starts, because libraries read them on import. OMP_WAIT_POLICY keeps
    waiting threads from spinning, which would take cores from other processes. If this process already has a
    value of OMP_WAIT_POLICY, that value is used.
    """
    count = str(threads)
    policy = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    return {"OMP_NUM_THREADS": count, "RAYON_NUM_THREADS": count, "OMP_WAIT_POLICY": policy}


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs available to this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ignores the first invalid name and all names after it. Users set -1, which is invalid, to hide
        # all GPUs.
        return list(takewhile(lambda name: name not in {"", "-1"}, map(str.strip, visible.split(","))))
    devices = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number in range(len(list(devices.iterdir())))] if devices.is_dir() else []


def may_have_gpu() -> bool:
    """Whether PyTorch may find a GPU on this host. If not, PyTorch need not be imported to look for one."""
    if platform.system() != "Linux":
        return True
    return any(Path(path).exists() for path in _GPU_DRIVERS)


def worker_name(device: str, process: str, environ: Mapping[str, str] = os.environ) -> str:
    """Make a worker's name from its host, its accelerator and its process.

    >>> worker_name("cuda", "4711", {"CUDA_VISIBLE_DEVICES": "1,2"}).partition(".")[2]
    'cuda1.4711'
    """
    host = socket.gethostname().partition(".")[0]
    if device == "cuda":
        first = environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
        number = first.removeprefix("GPU-").removeprefix("MIG-")
        device = f"cuda{first}" if first.isdecimal() else f"cuda-{number[:8]}"
    return f"{host}.{device}.{process}"


def cpu_name() -> str:
    """The CPU's name, or its architecture if the system does not tell the name."""
    return _cpu_field("model name") or platform.processor() or platform.machine()


def cpu_model() -> str:
    """Return the CPU's family, model and stepping numbers, which a hypervisor shows even if it hides the
    name.

    The text is empty if the system does not list these numbers.
    """
    fields = {field: _cpu_field(f"{field}\t") for field in ("cpu family", "model", "stepping")}
    return " ".join(f"{name} {number}" for name, number in fields.items() if number)


def cpu_flags() -> frozenset[str]:
    """The CPU's instruction sets, as Linux names them; empty if the system does not list them."""
    return frozenset((_cpu_field("flags") or _cpu_field("Features")).split())


@cache
def _cpu_field(name: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
