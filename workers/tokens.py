"""Text pairs to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.planner import Rows

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Padded model input: ``ids``, ``types`` and ``mask`` of shape ``[rows, longest]``.

    ``types`` (segment ids) is ``None`` for models that have none.
    """

    ids: Ids
    types: Ids | None
    mask: Ids


@dataclass(frozen=True)
class Tokens:
    """Token ids of `n` pairs, end to end; row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Ids
    types: Ids | None
    offsets: Ids

    @property
    def lengths(self) -> Ids:
        """Tokens in each row, shape ``[n]``."""
        return np.diff(self.offsets)

    def pad(self, rows: Rows, pad_id: int) -> Batch:
        """The given rows as one rectangle, padded on the right."""
        lengths = self.lengths[rows]
        mask = np.arange(lengths.max(initial=0))[None, :] < lengths[:, None]
        places = np.concatenate([np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])
        ids = np.full(mask.shape, pad_id, dtype=np.int64)
        ids[mask] = self.ids[places]
        types = None
        if self.types is not None:
            types = np.zeros(mask.shape, dtype=np.int64)
            types[mask] = self.types[places]
        return Batch(ids, types, mask.astype(np.int64))


class PairTokenizer:
    """A Hugging Face tokenizer applied to pairs, as sentence-transformers applies it.

    Parameters
    ----------
    tokenizer
        Any `transformers.PreTrainedTokenizerBase`.
    max_length
        Longest pair in tokens, special tokens included; the longer text is cut first.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.pad_id = tokenizer.pad_token_id or 0  # masked out: any id does where there is none

    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        """Tokenize pairs ``[n]`` in one call."""
        encoded = self._tokenizer(
            list(queries),
            list(passages),
            truncation="longest_first",
            max_length=self.max_length,
            padding=False,
            return_attention_mask=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        types: list[list[int]] | None = encoded.get("token_type_ids")
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in ids], out=offsets[1:])
        return Tokens(_flat(ids), None if types is None else _flat(types), offsets)


def _flat(rows: list[list[int]]) -> Ids:
    return (
        np.concatenate([np.asarray(row, dtype=np.int64) for row in rows]) if rows else np.zeros(0, np.int64)
    )
