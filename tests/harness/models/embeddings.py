"""A retriever without a model, for tools that take a SentenceTransformer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Bags:
    """Embeds texts as counts of characters; has the methods of SentenceTransformer that mining calls."""

    device = torch.device("cpu")

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        counts = np.array([[text.count(each) + 0.01 for each in "aeghimnorv0123456789"] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

    encode_document = encode_query

    def similarity(self, queries: Any, passages: Any) -> Any:
        return torch.as_tensor(queries) @ torch.as_tensor(passages).T

    def similarity_pairwise(self, queries: Any, passages: Any) -> Any:
        return (torch.as_tensor(queries) * torch.as_tensor(passages)).sum(1)


def bags() -> Any:
    """A retriever, typed as whatever takes it wants."""
    return Bags()
