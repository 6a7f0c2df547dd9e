"""The CPU cores and memory available to this process, under container and resource limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""A limit above this counts as no limit. Without a limit, cgroups of version 1 show a number close to 2⁶³."""


@dataclass(frozen=True)
class Cgroups:
    """The control groups of this process, in versions 1 and 2 of Linux's interface.

    Parameters
    ----------
    mounts
        Folder in which the hierarchies are mounted.
    own
        File that names the groups of this process.
    """

    mounts: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def cores(self) -> float | None:
        """The number of cores that the tightest quota allows (CPU seconds in a second), or ``None`` without a
        quota.
        """
        quotas = [tuple(_read(folder / "cpu.max").split()) for folder in self._groups("")]
        for folder in self._groups("cpu"):
            quotas.append((_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
        allowed = [
            int(quota) / int(period)
            for quota, period in filter(None, quotas)
            if quota.isdecimal() and period.isdecimal() and int(period)
        ]
        return min(allowed, default=None)

    def memory(self) -> Iterator[tuple[int, int]]:
        """Yield the memory limit and the used memory, in bytes, of each control group that has a limit.

        Cached files that were not read lately do not count as used, because the kernel drops them when memory
        runs short.
        """
        files = (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        for controller, limit_file, used_file, cached_name in files:
            for folder in self._groups(controller):
                limit, used = _read(folder / limit_file), _read(folder / used_file)
                if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
                    cached = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
                    yield int(limit), max(int(used) - int(cached.get(cached_name, 0)), 0)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's control group and of the groups above it.

        For cgroups of version 2, `controller` is ``""``.
        """
        for line in _read(self.own).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controller in controllers.split(","):
                root = self.mounts / controllers if controllers else self.mounts
                # In a container, `path` may be a path on the host that does not exist in the container.
                parts = Path(path.lstrip("/")).parts
                yield root
                yield from (root.joinpath(*parts[: end + 1]) for end in range(len(parts)))


def cores(cgroups: Cgroups = Cgroups()) -> int:
    """The number of CPU cores that this process may use, by its affinity and its quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroups.cores()
    return count if quota is None else max(min(count, int(quota)), 1)


def total_memory(cgroups: Cgroups = Cgroups()) -> int:
    """Bytes of memory that the machine has, or the container's limit if it is lower."""
    import psutil  # imported here, so that a process that asks only for the cores starts sooner

    return min([psutil.virtual_memory().total, *(limit for limit, _ in cgroups.memory())])


def free_memory(cgroups: Cgroups = Cgroups()) -> int:
    """Bytes of memory that this process may still take before the system or a limit refuses more."""
    import psutil

    free = [psutil.virtual_memory().available, *(limit - used for limit, used in cgroups.memory())]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free.append(limit - psutil.Process().memory_info().vms)
    return max(min(free), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
