"""Runs models in OpenVINO on the CPU. A batch is cut into pieces, which several streams compute at the same
time, each on its own cores.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from rankmill.workers.backends.base import Backend, Logits, OutOfMemory
from rankmill.workers.backends.speed import INT8
from rankmill.workers.batches.tokens import INPUTS, Batch, BatchPiece, cut_batch
from rankmill.workers.host.device import threads

# OpenVINO's telemetry reports to Google Analytics and forks the process. With this line its import fails, and
# OpenVINO reports nothing.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402

# OpenVINO's bindings import NumPy when they first need it. Two threads that import NumPy at the same time
# wait for each other forever while they hold Python's lock, so nothing else runs. This line lets one thread
# import NumPy first.
_ = openvino.Tensor(openvino.Type.f32, openvino.Shape([1])).data

__all__ = ["OpenVinoBackend", "compile_graph", "core", "openvino"]

_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}


@cache
def core() -> openvino.Core:
    """Return OpenVINO's `Core`, which compiles models. The process has only one core, and never deletes it.

    The CPU plugin of each core gives the thread a stack for signals. When a core is deleted, the plugin
    restores the stack that the thread had before, even if that stack has been freed. So with several cores,
    the next signal, such as SIGTERM, may end the process with a segmentation fault.
    """
    return openvino.Core()


class OpenVinoBackend(Backend):
    """A model that OpenVINO runs on the CPU. Its graph is compiled when the object is made.

    Parameters
    ----------
    graph
        From `rankmill.workers.backends.openvino.graph.openvino_graph`.
    precision
        ``fp32``, ``bf16`` or a kind of `INT8`. With a kind of `INT8` the graph's weights have 8 bits, and
        inputs are quantized when the model runs.
    alone
        Whether each request is computed on one thread. As many requests as the worker has threads then run at
        the same time.
    """

    name = "openvino"
    device = "cpu"

    def __init__(self, graph: Any, precision: str, *, alone: bool = False) -> None:
        self._inputs = INPUTS[: len(graph.inputs)]
        options: dict[str, Any] = {"NUM_STREAMS": threads()} if alone else {}
        self._compiled = compile_graph(graph, precision, options)
        self.precision = precision
        self.pieces = int(self._compiled.get_property("NUM_STREAMS"))
        self.depth = int(self._compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        constants = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
        weights = sum(
            math.prod(node.get_output_shape(0)) * node.get_output_element_type(0).size for node in constants
        )
        self.bytes = weights // 2 if self.precision == "bf16" else weights
        self._idle: list[Any] = []

    def submit(self, batch: Batch) -> OpenVinoForward:
        """Begin the forward of a batch. OpenVINO computes it in its own threads, each piece of the batch in a
        stream. Raises `OutOfMemory`.
        """
        started: list[tuple[BatchPiece, Any]] = []
        for piece in cut_batch(batch, self.pieces):
            named = piece.batch.named()
            request = self._idle.pop() if self._idle else self._compiled.create_infer_request()
            try:
                request.start_async([named[name] for name in self._inputs])
            except RuntimeError as error:
                for _, other in started:
                    other.cancel()
                raise _explained(error) from error
            started.append((piece, request))
        return OpenVinoForward(started, self._idle)


class OpenVinoForward:
    """The forward of a batch, made of several requests to OpenVINO, each for some of the rows."""

    def __init__(self, started: list[tuple[BatchPiece, Any]], idle: list[Any]) -> None:
        self._started = started
        self._idle = idle

    def result(self) -> Logits:
        parts: list[tuple[BatchPiece, Logits]] = []
        errors: list[RuntimeError] = []
        for piece, request in self._started:
            try:
                request.wait()
            except RuntimeError as error:
                # the other requests still run, and must end before they are used again
                errors.append(error)
                continue
            parts.append((piece, np.array(request.get_output_tensor(0).data, np.float32)))
            self._idle.append(request)
        if errors:
            raise _explained(errors[0]) from errors[0]
        rows = sum(len(piece.rows) for piece, _ in parts)
        logits: Logits = np.empty((rows, *parts[0][1].shape[1:]), np.float32)
        for piece, some in parts:
            logits[piece.rows] = some
        return logits


def compile_graph(graph: Any, precision: str, options: Mapping[str, Any] | None = None) -> Any:
    """Compile a graph of OpenVINO for the CPU, to run on the worker's threads in fp32, bf16 or a kind of
    int8.
    """
    group, precision = INT8.get(precision, (None, precision))
    defaults: dict[str, Any] = {
        "PERFORMANCE_HINT": "THROUGHPUT",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[precision],
        "INFERENCE_NUM_THREADS": threads(),
        "ENABLE_CPU_PINNING": False,  # with pinning, all workers of a host would use the same cores
    }
    if group:
        defaults["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
    return core().compile_model(graph, "CPU", {**defaults, **(options or {})})


def _explained(error: RuntimeError) -> Exception:
    out_of_memory = any(sign in str(error) for sign in ("bad_alloc", "allocate"))
    return OutOfMemory(str(error)) if out_of_memory else error
