"""PyTorch: CPU, CUDA and MPS, with scaled-dot-product attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from jobs.errors import SpecError
from workers.backends import Logits, OutOfMemory
from workers.backends.first_token import read_first_token_only
from workers.tokens import Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TorchBackend:
    """A `transformers` sequence classifier with one output.

    Parameters
    ----------
    source
        Directory or hub id.
    revision
        Branch, tag or commit on the hub.
    device
        ``cpu``, ``cuda``, ``mps``, as PyTorch names it.
    precision
        A key of `DTYPES` that the device supports.

    Raises
    ------
    SpecError
        The model has another number of outputs than one.
    OSError, ValueError
        From transformers, when there is no such model or its weights are not safetensors.
    """

    name = "torch"

    def __init__(self, source: str | Path, revision: str | None, device: str, precision: str) -> None:
        self.device = device
        self.precision = precision
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            source,
            revision=revision or "main",
            dtype=DTYPES[precision],
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
        if model.config.num_labels != 1:
            raise SpecError(
                f"model {source} has {model.config.num_labels} outputs, but a score needs exactly one: "
                "use a cross-encoder with num_labels=1"
            )
        self.config = model.config
        read_first_token_only(model)
        self._model = model.eval().to(device)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Logits:
        """Logits of shape ``[rows]``, in float32; raises `OutOfMemory`."""
        inputs = {"input_ids": batch.ids, "token_type_ids": batch.types, "attention_mask": batch.mask}
        try:
            tensors = {
                name: torch.from_numpy(array).to(self.device)
                for name, array in inputs.items()
                if array is not None
            }
            logits: torch.Tensor = self._model(**tensors).logits
            result: Logits = logits[:, 0].float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            self._release_cache()
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error):  # the CPU allocator has no error type of its own
                raise OutOfMemory(str(error)) from error
            raise
        return result

    def _release_cache(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()
        elif self.device == "mps":
            torch.mps.empty_cache()
