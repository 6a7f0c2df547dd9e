"""PyTorch: CPU, CUDA and MPS, with scaled-dot-product attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workers.backends.base import DeviceLost, Logits, OutOfMemory
from workers.backends.first_token import read_first_token_only
from workers.backends.head import cast_all_but_head
from workers.device import empty_cache
from workers.models.tokens import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchBackend:
    """A `transformers` sequence classifier with one output.

    Parameters
    ----------
    classifier
        From `load_classifier`.
    device
        ``cpu``, ``cuda`` or ``mps``: PyTorch's name of the device.
    precision
        A key of `DTYPES` that the device supports.
    """

    name = "torch"

    def __init__(self, classifier: Any, device: str, precision: str) -> None:
        self.device = device
        self.precision = precision
        self.depth = 2 if device == "cuda" else 1
        read_first_token_only(classifier)
        cast_all_but_head(classifier, DTYPES[precision])
        with _device_errors(device):
            self._model = classifier.to(device)
        self.bytes = sum(tensor.nbytes for tensor in classifier.state_dict().values())

    @torch.inference_mode()
    def submit(self, batch: Batch) -> TorchForward:
        """Begin a forward, on CUDA without waiting for the device; raises `OutOfMemory`."""
        inputs = {"input_ids": batch.ids, "token_type_ids": batch.types, "attention_mask": batch.mask}
        with _device_errors(self.device):
            tensors = {name: self._put(array) for name, array in inputs.items() if array is not None}
            logits: torch.Tensor = self._model(**tensors).logits[:, 0]
            return TorchForward(logits.to("cpu", non_blocking=True), self._mark())

    def _put(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """The array on the device; on CUDA through pinned memory, so that the copy is asynchronous."""
        tensor = torch.from_numpy(array)
        if self.device == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=self.device == "cuda")

    def _mark(self) -> torch.cuda.Event | None:
        """On CUDA, which runs asynchronously, an event after everything submitted so far; else ``None``."""
        if self.device != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


class TorchForward:
    """Logits that may still be on their way to the host."""

    def __init__(self, logits: torch.Tensor, ready: torch.cuda.Event | None) -> None:
        self._logits = logits
        self._ready = ready

    def result(self) -> Logits:
        """Logits of shape ``[rows]``, in float32; raises `OutOfMemory`."""
        if self._ready is not None:
            with _device_errors("cuda"):
                self._ready.synchronize()
        result: Logits = self._logits.numpy()
        return result


@contextmanager
def _device_errors(device: str) -> Iterator[None]:
    """Turn PyTorch's errors of the device into `OutOfMemory` and `DeviceLost`."""
    try:
        yield
    except torch.AcceleratorError as error:  # the CUDA context is broken: every later call fails
        raise DeviceLost(str(error)) from error
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        empty_cache(device)
        raise OutOfMemory(str(error)) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of PyTorch means that memory ran out; only CUDA has an error type for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in ("can't allocate memory", "MPS backend out of memory"))
