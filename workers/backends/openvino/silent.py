"""OpenVINO as a library should be: importing it neither reports to anyone nor forks the process.

It does both, to Google Analytics, where `openvino_telemetry` can be imported, which its package brings
along; without, it is silent, and so is NNCF.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # an import of it fails

import openvino  # noqa: E402

__all__ = ["openvino"]
