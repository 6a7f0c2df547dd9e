"""What processes that tests start are given: the commands' folder, the environment."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

FORKS = "TESTS_FORKS"
"""Where this variable is set, it is the address of the processes that fork for all of pytest-xdist's."""

if not {"PYTEST_XDIST_WORKER", FORKS} & os.environ.keys():
    # What is made from models goes where it is gone afterwards; pytest-xdist's processes and forks share it.
    _CACHE = tempfile.TemporaryDirectory(prefix="rankmill-cache-")
    os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Hundreds of processes read the project's modules: they are compiled once, whatever a container wants.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

BIN = Path(sys.executable).parent

ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("RANKMILL_", "REDIS_URL"))},
    "RANKMILL_THREADS": "1",  # the suite's workers are processes; more threads would fight them
    "HF_HUB_OFFLINE": "1",
}

SWITCH = "TESTS_SWITCH_SECONDS"
"""Where this variable is set, a process that tests start switches its threads after so many seconds."""

SIMULATED = "benchmarks.simulated.SimulatedWorker"
"""Class of real workers that sleep in the place of a model: `benchmarks.simulated.SECONDS` says how long."""

ALL_ROOTS = {"RANKMILL_RUNNER_READ": "/", "RANKMILL_RUNNER_WRITE": "/"}
"""For runners of tests whose models and files are anywhere."""

QUICK_LEASE = {"RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_LEASE_SECONDS": "3"}
"""For workers whose death is to be noticed soon; longer than a busy machine keeps a thread waiting."""
