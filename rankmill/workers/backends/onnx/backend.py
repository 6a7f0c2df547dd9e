"""Runs models in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime

from rankmill.workers.backends.base import Backend, LayerShape, Logits, OutOfMemory
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.host.device import threads


class OnnxBackend(Backend):
    """A model that ONNX Runtime runs on the CPU, loaded from an ONNX file.

    Parameters
    ----------
    path
        From `rankmill.workers.backends.onnx.files.onnx_file`.
    precision
        The precision for which the file was made.
    threads
        CPU threads of a forward.
    """

    name = "onnx"
    device = "cpu"
    depth = 1

    def __init__(self, path: Path, precision: str, threads: int) -> None:
        self.precision = precision
        self.bytes = path.stat().st_size + sum(file.stat().st_size for file in path.parent.glob("*data"))
        self._session = session(path, threads)
        self._inputs = [node.name for node in self._session.get_inputs()]

    def submit(self, batch: Batch) -> OnnxForward:
        named = batch.named()
        try:
            logits = self._session.run(None, {name: named[name] for name in self._inputs})[0]
        except Exception as error:  # ONNX Runtime's errors have no common base class
            if any(sign in str(error) for sign in ("bad_alloc", "Failed to allocate")):
                raise OutOfMemory(str(error)) from error
            raise
        return OnnxForward(logits)


def session(model: Path, threads: int) -> Any:
    """Make an ONNX Runtime session for a file, with `threads` CPU threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # a memory pattern helps only if all batches have the same shape
    options.log_severity_level = 3
    # Threads that spin while they wait take the cores of other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OnnxForward:
    """Logits of a batch, which ONNX Runtime has already computed."""

    def __init__(self, logits: Any) -> None:
        self._logits = logits

    def result(self) -> Logits:
        return np.asarray(self._logits, dtype=np.float32)


def timed_layer(shape: LayerShape) -> Callable[[], object]:
    """Make a function that runs a layer with random weights once in ONNX Runtime, in fp32, for timing."""
    from rankmill.workers.backends.layer import TimedLayer, example
    from rankmill.workers.backends.onnx.files import export

    hidden = example(shape)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "layer.onnx"
        export(TimedLayer(shape), {"hidden": hidden}, "output", file)
        ready = session(file, threads())
    return lambda: ready.run(None, {"hidden": hidden.numpy()})
