"""Cuts passages that are too long for a model into overlapping windows, of which the best one counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.batches.planner import Rows
from rankmill.workers.models.tokenizer import Tokenize, single_texts


class Windows:
    """Cuts passages.

    Parameters
    ----------
    tokenizer
        The Hugging Face tokenizer, to see where tokens begin in a text.
    tokenize
        The tokenizer of pairs, with its limit on the length.
    stride
        Tokens from the start of a window to the start of the next; ``None``: half of a window.

    Raises
    ------
    SpecError
        The tokenizer does not tell where its tokens are in a text.
    """

    def __init__(self, tokenizer: Any, tokenize: Tokenize, stride: int | None) -> None:
        try:
            self._texts = single_texts(tokenizer)
        except (AttributeError, ValueError) as error:
            raise SpecError(f"its tokenizer cannot cut passages for --long split ({error})") from error
        self._tokenize, self._stride = tokenize, stride

    def cut(self, queries: Sequence[str], passages: Sequence[str]) -> tuple[Rows, list[str], list[str]]:
        """Pairs ``[n]`` as pairs ``[windows]``, and the number of the pair that each of them is of.

        A passage that fits stays whole. So does one whose query leaves less than a quarter of the model's
        length: it is truncated, as without windows.
        """
        distinct = list(dict.fromkeys(queries))
        taken = self._tokenize(distinct, [""] * len(distinct)).lengths.tolist()
        limit = self._tokenize.max_length
        rooms = {query: limit - used for query, used in zip(distinct, taken, strict=True)}
        rows: list[int] = []
        texts: list[str] = []
        found = self._texts.encode_batch(list(passages), add_special_tokens=False)
        for row, (query, passage, encoding) in enumerate(zip(queries, passages, found, strict=True)):
            room, spans = rooms[query], encoding.offsets
            whole = len(spans) <= room or room < limit // 4
            parts = [passage] if whole else self._parts(passage, spans, room)
            rows += [row] * len(parts)
            texts += parts
        return np.asarray(rows, np.intp), [queries[row] for row in rows], texts

    def _parts(self, passage: str, spans: Sequence[tuple[int, int]], room: int) -> list[str]:
        step = min(self._stride or max(room // 2, 1), room)
        last = len(spans) - room
        starts = [*range(0, last, step), last]  # the last window is as long as the others
        return [passage[spans[start][0] : spans[start + room - 1][1]] for start in starts]
