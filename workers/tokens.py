"""Text pairs to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, cast

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

    @classmethod
    def join(cls, pieces: Sequence[Tokens]) -> Tokens:
        """The rows of all pieces, in order."""
        if len(pieces) == 1:
            return pieces[0]
        none = np.zeros(0, dtype=np.int64)
        types = [piece.types for piece in pieces if piece.types is not None]
        lengths = np.concatenate([none, *(piece.lengths for piece in pieces)])
        return cls(
            ids=np.concatenate([none, *(piece.ids for piece in pieces)]),
            types=np.concatenate(types) if types else None,
            offsets=np.concatenate([none, [0], np.cumsum(lengths)]),
        )

    @cached_property
    def lengths(self) -> Ids:
        """Tokens in each row, shape ``[n]``."""
        return np.diff(self.offsets)

    def places(self, rows: Rows) -> Ids:
        """Where in ``ids`` the tokens of the given rows stand, row after row."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        return np.repeat(self.offsets[rows] - ends + lengths, lengths) + np.arange(lengths.sum())


def pad(parts: Sequence[tuple[Tokens, Rows]], pad_id: int) -> Batch:
    """Rows of one or several `Tokens` as one rectangle, padded on the right."""
    lengths = np.concatenate([tokens.lengths[rows] for tokens, rows in parts])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    found = [(tokens, tokens.places(rows)) for tokens, rows in parts]
    ids = np.full(mask.shape, pad_id, dtype=np.int64)
    ids[mask] = np.concatenate([tokens.ids[places] for tokens, places in found])
    types = None
    if all(tokens.types is not None for tokens, _ in found):
        types = np.zeros(mask.shape, dtype=np.int64)
        types[mask] = np.concatenate([cast("Ids", tokens.types)[places] for tokens, places in found])
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
        count = int(offsets[-1])
        return Tokens(_flat(ids, count), None if types is None else _flat(types, count), offsets)


def _flat(rows: list[list[int]], count: int) -> Ids:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=count)
