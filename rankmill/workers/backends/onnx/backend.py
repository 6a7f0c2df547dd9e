"""The ONNX Runtime backend's session and forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from rankmill.workers.backends.base import Logits, OutOfMemory
from rankmill.workers.batches.tokens import Batch

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxBackend:
    """A sequence classifier from an ONNX file.

    Parameters
    ----------
    path
        From `rankmill.workers.backends.onnx.files.onnx_file`.
    device
        ``cpu`` or ``cuda``.
    precision
        The precision of the file.
    threads
        CPU threads of a forward.
    """

    name = "onnx"
    shares_prefixes = False
    packs = False
    pieces = 1
    depth = 1

    def __init__(self, path: Path, device: str, precision: str, threads: int) -> None:
        self.device = device
        self.precision = precision
        self.bytes = path.stat().st_size + sum(each.stat().st_size for each in path.parent.glob("*data"))
        self._session = session(path, device, threads)
        self._inputs = [each.name for each in self._session.get_inputs()]

    def submit(self, batch: Batch) -> OnnxForward:
        """Run a forward; raises `OutOfMemory`."""
        named = batch.named()
        try:
            logits = self._session.run(None, {name: named[name] for name in self._inputs})[0]
        except Exception as error:  # ONNX Runtime's errors have no common base class
            if any(sign in str(error) for sign in ("bad_alloc", "Failed to allocate")):
                raise OutOfMemory(str(error)) from error
            raise
        return OnnxForward(logits)


def session(model: Path, device: str, threads: int) -> Any:
    """Make an ONNX Runtime session for a file, with `threads` CPU threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # it only helps when all inputs have one shape
    options.log_severity_level = 3
    # Threads that spin while they wait take the cores of other workers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model, options, providers=[_PROVIDERS[device]])


class OnnxForward:
    """Logits that are already computed."""

    def __init__(self, logits: Any) -> None:
        self._logits = logits

    def result(self) -> Logits:
        """Logits of shape ``[rows]`` or ``[rows, outputs]``, in float32."""
        logits: Logits = np.asarray(self._logits, dtype=np.float32)
        return logits[:, 0] if logits.ndim == 2 and logits.shape[1] == 1 else logits
