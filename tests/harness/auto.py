"""What `auto` means on a CPU while tests run: what the machine is fastest in, or the precision of `AUTO`.

A machine chooses fp32 or bf16 by measuring, so the suite has to pass with either, on whatever it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankmill.workers.backends import auto
from rankmill.workers.backends.base import BackendKind
from rankmill.workers.backends.speed import CPU_PRECISIONS, Speeds, cpu_speeds

AUTO = "TESTS_AUTO"
"""Where this variable is ``fp32`` or ``bf16``, workers take this machine for fastest in it."""


def force_auto() -> None:
    """Do as `AUTO` says, in this process and in its forks; a test that sets speeds of its own has them."""
    wanted = os.environ.get(AUTO)
    if wanted is None:
        return
    if wanted not in CPU_PRECISIONS:
        raise ValueError(f"{AUTO}={wanted} is not one of {', '.join(CPU_PRECISIONS)}")

    def forced(kinds: Iterable[BackendKind], config: Any, cache: Path) -> Speeds:
        return _fastest_in(wanted, cpu_speeds(kinds, config, cache))

    auto.cpu_speeds = forced  # type: ignore[attr-defined]  # what chooses asks for it by this name


def _fastest_in(wanted: str, speeds: Speeds) -> Speeds:
    """The same speeds, but each other precision is at most half as fast as the slowest in the wanted one."""
    measured = [speed for (_, precision), speed in speeds.gflops.items() if precision == wanted]
    if not measured:
        return speeds
    others = set(CPU_PRECISIONS) - {wanted}
    most = min(measured) / 2
    slower = {each: min(speed, most) if each[1] in others else speed for each, speed in speeds.gflops.items()}
    return replace(speeds, gflops=slower)
