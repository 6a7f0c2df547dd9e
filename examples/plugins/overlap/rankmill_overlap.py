"""A backend that scores a pair by how many of the query's words the passage has."""

from functools import cache
from typing import Any

import numpy as np

from rankmill.workers.backends.base import Backend, BackendKind, Logits, ModelFiles
from rankmill.workers.batches.tokens import Batch


def shares(ids: Any, types: Any, mask: Any) -> Any:
    """The share of each query's tokens that its passage has, from arrays of NumPy or PyTorch ``[rows,
    tokens]``.
    """
    query, passage = (mask == 1) & (types == 0), (mask == 1) & (types == 1)
    same = (ids[:, :, None] == ids[:, None, :]) & query[:, :, None] & passage[:, None, :]
    return same.any(2).sum(1) / query.sum(1)


class Overlap(Backend):
    """The loaded model, which computes in `submit`, so that a result is there when `submit` returns."""

    name, device, precision = "overlap", "cpu", "fp32"
    depth, bytes = 1, 4

    def __init__(self, files: ModelFiles, device: str, precision: str) -> None:
        self._scale, self._logits = float(files.classifier().scale), np.zeros(0, np.float32)

    def submit(self, batch: Batch) -> "Overlap":
        self._logits = (self._scale * shares(batch.ids, batch.types, batch.mask)).astype(np.float32)
        return self

    def result(self) -> Logits:
        return self._logits


@cache
def register() -> None:
    """Let transformers know the model, because each worker compares the backend's scores with those of
    transformers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import SequenceClassifierOutput

    class OverlapConfig(PretrainedConfig):  # type: ignore[misc]
        model_type = "overlap"

    class OverlapModel(PreTrainedModel):  # type: ignore[misc]
        config_class = OverlapConfig

        def __init__(self, config: OverlapConfig) -> None:
            super().__init__(config)
            self.scale = torch.nn.Parameter(torch.ones(1))
            self.post_init()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any, **_: Any) -> Any:
            logits = self.scale * shares(input_ids, token_type_ids, attention_mask)
            return SequenceClassifierOutput(logits=logits[:, None])

    AutoConfig.register("overlap", OverlapConfig)
    AutoModelForSequenceClassification.register(OverlapConfig, OverlapModel)


KIND = BackendKind("overlap", {"cpu": ("fp32",)}, Overlap, families=frozenset({"overlap"}), register=register)
