"""Imports OpenVINO without its telemetry, which would report to Google Analytics and fork the process.

OpenVINO's package installs `openvino_telemetry`. If that cannot be imported, neither OpenVINO nor NNCF
reports anything.
"""

from __future__ import annotations

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # importing it now fails

import openvino  # noqa: E402

__all__ = ["openvino"]
