"""The process's one OpenVINO core.

The CPU plugin of each core gives its thread a stack for signals, and puts the one before it back when the
core goes, also if that is gone itself: with several cores, the next signal (SIGTERM, say) may end the process
with a segmentation fault. So there is one, which never goes.
"""

from __future__ import annotations

from functools import cache

from rankmill.workers.backends.openvino.silent import openvino


@cache
def core() -> openvino.Core:
    """The core."""
    return openvino.Core()
