"""Imports OpenVINO without its telemetry, which reports to Google Analytics and forks the process.

OpenVINO's package installs `openvino_telemetry`; if its import fails, OpenVINO reports nothing.
"""

from __future__ import annotations

import sys
from functools import cache

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # its import now fails

import openvino  # noqa: E402

# OpenVINO's bindings import NumPy when they first need it. Two threads that import NumPy at the same time
# wait for each other forever while they hold Python's lock, so nothing else runs. This line lets one thread
# import NumPy first.
_ = openvino.Tensor(openvino.Type.f32, openvino.Shape([1])).data

__all__ = ["core", "openvino"]


@cache
def core() -> openvino.Core:
    """Return OpenVINO's object for compiling models (`Core`), the only one of the process, which is never
    deleted.

    The CPU plugin of each core gives the thread a stack for signals. When a core is deleted, the plugin
    restores the stack that the thread had before, even if that stack has been freed. So with several cores,
    the next signal, such as SIGTERM, may end the process with a segmentation fault.
    """
    return openvino.Core()
