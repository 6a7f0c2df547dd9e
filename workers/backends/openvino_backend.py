"""OpenVINO: x86 CPUs, several forwards under way at a time."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import openvino
import torch
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

from workers.backends import Logits, OutOfMemory
from workers.backends.traceable import Traceable, inputs_of
from workers.device import native_precision
from workers.tokens import Batch

_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}

_GROUP = 128
"""Values that share a scale where 8-bit weights are met: with OpenVINO's own 32 it is no faster than bf16."""


class OpenVinoBackend:
    """A `transformers` sequence classifier, compiled for the CPU in this process.

    It uses as many threads as PyTorch does.

    Parameters
    ----------
    classifier
        From `load_classifier`, in float32, of a family that `reads_first_token`.
    precision
        ``fp32``, ``bf16``, or ``int8``: weights in 8 bits, what meets them quantized as it comes, and
        the rest in the CPU's native precision. `precision` says what the CPU made of it.
    """

    name = "openvino"
    device = "cpu"

    def __init__(self, classifier: Any, precision: str) -> None:
        scorer = Traceable(classifier)
        self._inputs = scorer.inputs
        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "THROUGHPUT",
            "INFERENCE_PRECISION_HINT": _PRECISIONS[
                native_precision("cpu", list(_PRECISIONS)) if precision == "int8" else precision
            ],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "ENABLE_CPU_PINNING": False,  # or every worker of a host would pin itself to the same cores
        }
        model = _convert(scorer)
        if precision == "int8":
            model = _with_small_weights(model)
            options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _GROUP
        self._compiled = openvino.Core().compile_model(model, "CPU", options)
        used = self._compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        native = next((ours for ours, theirs in _PRECISIONS.items() if theirs == used), used)
        self.precision = "int8 weights" if precision == "int8" else native
        self.depth = int(self._compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        weights = sum(tensor.numel() for tensor in classifier.state_dict().values())
        self.bytes = weights * (1 if precision == "int8" else 2 if native == "bf16" else 4)
        self._idle: list[Any] = []

    def submit(self, batch: Batch) -> OpenVinoForward:
        """Begin a forward in OpenVINO's own threads; raises `OutOfMemory`."""
        named = inputs_of(batch)
        request = self._idle.pop() if self._idle else self._compiled.create_infer_request()
        try:
            request.start_async([named[name] for name in self._inputs])
        except RuntimeError as error:
            raise _explained(error) from error
        return OpenVinoForward(request, self._idle)


class OpenVinoForward:
    """A request under way, which goes back to the idle ones when its logits are taken."""

    def __init__(self, request: Any, idle: list[Any]) -> None:
        self._request = request
        self._idle = idle

    def result(self) -> Logits:
        """Logits of shape ``[rows]``, in float32; raises `OutOfMemory`."""
        try:
            self._request.wait()
        except RuntimeError as error:
            raise _explained(error) from error
        logits: Logits = self._request.get_output_tensor(0).data.copy()
        self._idle.append(self._request)
        return logits


@torch.inference_mode()
def _convert(scorer: Traceable) -> Any:
    """OpenVINO's graph of the module, for any number of rows and tokens.

    By the frontend itself: `openvino.convert_model` traces several times over, which takes
    seconds, and reports its use over the network.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that PyTorch fears are fixed; tests vary them
        traced = torch.jit.trace(scorer, scorer.example(), check_trace=False)  # type: ignore[no-untyped-call]
    decoder = TorchScriptPythonDecoder(traced)  # named, as the frontend does not keep it alive
    frontend = FrontEndManager().load_by_framework("pytorch")
    return frontend.convert(frontend.load(decoder))


def _with_small_weights(model: Any) -> Any:
    """The graph with weights in 8 bits.

    Calibrating activations on a sample as well took 40 s for a small model and made its scores
    worse than any precision here, and no two workers would have the same sample.
    """
    # NNCF reports its use over the network, unless it takes itself to be under test.
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    nncf.set_log_level(logging.ERROR)
    with redirect_stdout(StringIO()):  # a progress bar
        # The head stays: of a matrix with one row, OpenVINO (2026.4) may lose the scale.
        head = nncf.IgnoredScope(patterns=[r".*classifier\.classifier.*"])
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=head)


def _explained(error: RuntimeError) -> Exception:
    """`OutOfMemory` where OpenVINO means that, else the error as it is."""
    out_of_memory = any(sign in str(error) for sign in ("bad_alloc", "allocate"))
    return OutOfMemory(str(error)) if out_of_memory else error
