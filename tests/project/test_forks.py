"""Processes of tests that are forks (`tests.harness.preloaded`)."""

from __future__ import annotations

import gc
import subprocess
from typing import Any

from tests.conftest import ENVIRON
from tests.harness.preloaded import PreloadedProcess


def test_a_process_that_a_failed_test_leaves_does_not_keep_others_from_starting() -> None:
    command = ["python", "-c", "import sys; sys.stdin.read()"]
    left: Any = PreloadedProcess(command, stdin=subprocess.PIPE, env=ENVIRON)
    holds = left.stdin
    left.traceback = left  # the circle in which a failed test holds what it has
    del left
    gc.collect()  # the process's socket is closed now
    process: Any = PreloadedProcess(command, stdin=subprocess.DEVNULL, env=ENVIRON)
    assert process.wait(timeout=60) == 0
    holds.close()
