"""Runs models in PyTorch on CPU, CUDA and MPS, with scaled-dot-product attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rankmill.workers.backends.base import Backend, DeviceLost, LayerShape, Logits, OutOfMemory
from rankmill.workers.backends.classifier import own_memory
from rankmill.workers.backends.head import cast_all_but_head
from rankmill.workers.backends.layer import TimedLayer, example
from rankmill.workers.backends.torch.graphs import Graphs
from rankmill.workers.backends.torch.packed import PackedRows
from rankmill.workers.backends.torch.prefixes import find_shared_prefixes
from rankmill.workers.batches.tokens import Batch
from rankmill.workers.host.device import empty_cache

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""The dtype in which PyTorch computes for each precision. In fp8 only the linear layers have 8 bits."""


class TorchBackend(Backend):
    """A model that PyTorch runs on a device.

    Parameters
    ----------
    network
        From `rankmill.workers.backends.torch.networks.load_network`.
    device
        PyTorch's name of the device, ``cpu``, ``cuda`` or ``mps``.
    precision
        A key of `DTYPES` that the device supports.
    """

    name = "torch"

    def __init__(self, network: Any, device: str, precision: str) -> None:
        self.device = device
        self.precision = precision
        self.depth = 2 if device == "cuda" else 1
        # With cuDNN's attention, each new shape of a batch would first wait for a plan of the computation.
        if device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)
        cast_all_but_head(network, DTYPES[precision], network.heads)
        with _device_errors(device):
            self.network = network.to(device)
            if device == "cpu":
                own_memory(self.network)
            if precision == "fp8":
                round_linear_layers(self.network)
        self.shares_prefixes = network.shares_prefixes
        self.graphs = Graphs(network.packed, self._put) if device == "cuda" else None
        self.bytes = sum(map(_bytes, network.state_dict().values()))

    @torch.inference_mode()
    def submit(self, batch: Batch) -> TorchForward:
        """Begin the forward of a batch, on CUDA without waiting for the device; raises `OutOfMemory` and
        `DeviceLost`.
        """
        shared = find_shared_prefixes(batch, self.network.skipped) if self.shares_prefixes else None
        with _device_errors(self.device):
            if self.packs:
                rows = self.network.pack_shared(shared) if shared else self.network.pack(batch)
                logits = self._packed(rows)
            elif shared is None:
                types = None if batch.types is None else self._put(batch.types)
                logits = self.network(self._put(batch.ids), self._put(batch.mask), types)
            else:
                logits = self.network.continued(*map(self._put, shared))
            logits = logits[:, 0] if logits.shape[1] == 1 else logits
            return TorchForward(logits.to("cpu", non_blocking=True), self._mark())

    def _packed(self, rows: PackedRows) -> Tensor:
        """Compute the logits ``[rows, outputs]`` of packed rows, by a CUDA graph if there is one for their
        shape.
        """
        logits = self.graphs.begin(rows) if self.graphs else None
        if logits is None:
            shape = rows.shape
            logits = self.network.packed(shape.taken_apart(self._put(rows.filled(shape))))
        return logits

    def _put(self, array: npt.NDArray[np.integer[Any]]) -> Tensor:
        """Copy an array to the device. On CUDA, pinned memory makes the copy asynchronous."""
        tensor = torch.from_numpy(array)
        if self.device == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=self.device == "cuda")

    def _mark(self) -> torch.cuda.Event | None:
        """Return a CUDA event that occurs when all submitted work is done, or ``None`` on other devices."""
        if self.device != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


_LEAST = 1e-12
"""In fp8, the inputs of a layer for one token share a scale. It is computed from their largest magnitude, or
from this value if that is larger, because a scale must not be 0.
"""


def round_linear_layers(network: nn.Module) -> None:
    """Make the linear layers of a network in bf16 compute with weights and inputs in 8-bit floating point
    (e4m3), by torchao, in place.

    Each row of weights and each token has its own scale, so no token depends on its neighbours. A model's
    last projections are not of type `nn.Linear`, so they are not rounded. Layers whose widths are not
    multiples of 16 are not rounded either, because the kernels do not take such layers.
    """
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    config = Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(),
        activation_value_lb=_LEAST,
        # otherwise other installed packages could change the kernels
        kernel_preference=KernelPreference.TORCH,
        set_inductor_config=False,  # with True, the whole process would multiply fp32 in TF32
    )
    quantize_(network, config, filter_fn=lambda module, _: type(module) is nn.Linear)


def _bytes(tensor: Tensor) -> int:
    """Return the size in bytes of a tensor, which may consist of several tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])


class TorchForward:
    """Logits of a batch, which may still be computed or copied from the device to the host."""

    def __init__(self, logits: Tensor, ready: torch.cuda.Event | None) -> None:
        self._logits = logits
        self._ready = ready

    def result(self) -> Logits:
        if self._ready is not None:
            with _device_errors("cuda"):
                self._ready.synchronize()
        result: Logits = self._logits.numpy()
        return result


@contextmanager
def _device_errors(device: str) -> Iterator[None]:
    """Within the ``with`` block, raise `OutOfMemory` and `DeviceLost` in place of PyTorch's errors about the
    device.
    """
    try:
        yield
    except torch.AcceleratorError as error:  # the CUDA context is broken: every later call fails
        raise DeviceLost(str(error).partition("\n")[0]) from error  # the other lines are hints for developers
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        clear_frames(error.__traceback__)  # the traceback would keep the forward's states in memory
        empty_cache(device)
        raise OutOfMemory(str(error)) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error of PyTorch means that memory ran out. Only CUDA has an error type for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    signs = "can't allocate memory", "MPS backend out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return any(sign in str(error) for sign in signs)


def timed_layer(shape: LayerShape, precision: str) -> Callable[[], object]:
    """Make a function that runs a layer with random weights once in PyTorch, for timing."""
    layer = TimedLayer(shape).to(DTYPES[precision])
    hidden = example(shape).to(DTYPES[precision])

    @torch.inference_mode()
    def run() -> object:
        return layer(hidden)

    return run
