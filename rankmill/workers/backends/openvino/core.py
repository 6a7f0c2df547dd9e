"""OpenVINO and its one core, without its telemetry, which reports to Google Analytics and forks the process.

OpenVINO's package installs `openvino_telemetry`. If that cannot be imported, OpenVINO reports nothing.
"""

from __future__ import annotations

import sys
from functools import cache

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # importing it now fails

import openvino  # noqa: E402

# Its bindings look NumPy up when they first need it: two threads at that wait for each other, for ever, and
# hold Python's lock, so that nothing else goes on.
_ = openvino.Tensor(openvino.Type.f32, openvino.Shape([1])).data

__all__ = ["core", "openvino"]


@cache
def core() -> openvino.Core:
    """The process's one core, which never goes.

    The CPU plugin of each core gives its thread a stack for signals, and puts the one before it back when the
    core goes, also if that is gone itself: with several cores, the next signal (SIGTERM, say) may end the
    process with a segmentation fault.
    """
    return openvino.Core()
