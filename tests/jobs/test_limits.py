"""What a container leaves a process: cores and memory, in both versions of control groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rankmill.jobs.runtime.limits import Cgroups, cores, free_memory, total_memory

GIB = 2**30
HOST_CORES = cores(Cgroups(Path("/nowhere"), Path("/nowhere")))


def cgroups(folder: Path, own: str, files: dict[str, str]) -> Cgroups:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "own").write_text(own)
    return Cgroups(folder / "cgroup", folder / "own")


V1 = "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),  # in a container with a namespace of its own
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, HOST_CORES),
        ("0::/pod/me\n", {"pod/me/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"}, 1),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 1),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, HOST_CORES),
        ("0::/\n", {"cpu.max": "no number"}, HOST_CORES),
        ("", {}, HOST_CORES),
    ],
)
def test_a_quota_counts_as_the_machine_s_cores(
    own: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert cores(cgroups(tmp_path, own, files)) == min(expected, HOST_CORES)


@pytest.mark.parametrize(
    ("own", "files", "total", "free"),
    [
        ("0::/\n", {"memory.max": f"{GIB}", "memory.current": f"{GIB // 2}"}, GIB, GIB // 2),
        (
            "0::/\n",
            {
                "memory.max": f"{GIB}",
                "memory.current": f"{GIB}",
                "memory.stat": f"anon 5\ninactive_file {GIB // 4}",
            },
            GIB,
            GIB // 4,
        ),
        (
            "0::/pod/me\n",
            {
                "pod/memory.max": f"{GIB // 2}",
                "pod/memory.current": f"{GIB // 4}",
                "pod/me/memory.max": f"{GIB}",
                "pod/me/memory.current": "0",
            },
            GIB // 2,
            GIB // 4,
        ),
        (
            V1,
            {
                "memory/docker/abc/memory.limit_in_bytes": f"{GIB}",
                "memory/docker/abc/memory.usage_in_bytes": f"{GIB - 1000}",
                "memory/docker/abc/memory.stat": "total_inactive_file 500",
            },
            GIB,
            1500,
        ),
    ],
)
def test_a_container_s_limit_counts_as_the_machine_s_memory(
    own: str, files: dict[str, str], total: int, free: int, tmp_path: Path
) -> None:
    found = cgroups(tmp_path, own, files)
    assert total_memory(found) == total
    assert free_memory(found) == free


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096)])
def test_without_a_limit_the_machine_s_memory_counts(limit: str, tmp_path: Path) -> None:
    files = {"memory.max": limit, "memory.current": "5"}
    assert total_memory(cgroups(tmp_path, "0::/\n", files)) == psutil.virtual_memory().total


def test_a_limit_of_the_address_space_counts() -> None:
    script = (
        "import psutil, resource; from rankmill.jobs.runtime.limits import free_memory; "
        "resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 5_000_000, -1)); "
        "print(free_memory())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) <= 5_000_000
