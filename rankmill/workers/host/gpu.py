"""Reads use, memory and temperature of this worker's NVIDIA GPU from the driver's library (NVML)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_METRICS = {
    "memory_reserved_bytes": "GPU memory of this worker.",
    "memory_used_bytes": "Used memory of the worker's GPU.",
    "memory_size_bytes": "Memory of the worker's GPU.",
    "utilization_ratio": "Share of time in which the worker's GPU was busy.",
    "temperature_celsius": "Temperature of the worker's GPU.",
}
"""The help text of each metric of a GPU, by the metric's name without its beginning ``rankmill_gpu_``."""

logger = logging.getLogger(__name__)


class Gpu(Collector):
    """The metrics that this process's GPU reports. There are none before `watch` is called."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def watch(self) -> None:
        """Load the library of the GPU's driver, which gives metrics, or log why it cannot be loaded."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except Exception as error:  # a worker can score without figures of the GPU
            logger.warning("the figures of the GPU cannot be read: %s", error)

    def describe(self) -> Iterable[Metric]:
        return [_gauge(name) for name in _METRICS]

    def collect(self) -> Iterable[Metric]:
        """The metrics that the GPU reports; a part of a GPU (MIG), for example, reports no temperature."""
        nvml = self._nvml
        if nvml is None:
            return
        with suppress(Exception):  # an error of the GPU's library must not lose the other metrics
            gpu = self._handle()
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
            yield _gauge("memory_used_bytes", memory.used)
            yield _gauge("memory_size_bytes", memory.total)
            with suppress(Exception):
                yield _gauge("utilization_ratio", nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
            with suppress(Exception):
                celsius = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
                yield _gauge("temperature_celsius", celsius)
        with suppress(Exception):
            if cuda := _cuda():
                yield _gauge("memory_reserved_bytes", cuda.memory_reserved())

    def _handle(self) -> Any:
        """NVML's handle of the first GPU that CUDA sees in this process."""
        if cuda := _cuda():  # CUDA may number GPUs in another order than NVML
            uuid = str(cuda.get_device_properties(0).uuid)
            for kind in ("GPU", "MIG"):
                with suppress(self._nvml.NVMLError):
                    return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if first.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(first))
        return self._nvml.nvmlDeviceGetHandleByUUID(first)


def _cuda() -> Any:
    """PyTorch's CUDA module if this process uses CUDA, otherwise ``None``."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if hasattr(cuda, "is_initialized") and cuda.is_initialized() else None


def _gauge(name: str, value: float = 0.0) -> Metric:
    return GaugeMetricFamily(f"rankmill_gpu_{name}", _METRICS[name], value)
