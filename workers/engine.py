"""Pairs in, scores out: tokenize, plan, forward, scatter.

>>> engine = Engine(load_model(ScoreSpec(model="demo"), "cpu"), token_budget=16384)
>>> engine.score(["how far is the moon"], ["About 384,000 km."]).scores  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jobs.errors import SpecError
from workers.backends import OutOfMemory
from workers.models import Model
from workers.planner import Rows, plan_batches
from workers.tokens import Tokens


@dataclass
class Scored:
    """Scores of `n` pairs and what they cost.

    ``scores`` is float32 of shape ``[n]``, NaN where ``errors`` (row to reason) says why.
    ``tokens`` were real; ``padded_tokens`` were computed, padding included.
    """

    scores: npt.NDArray[np.float32]
    errors: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0


class Engine:
    """Scores pairs with one model.

    Parameters
    ----------
    model
        From `workers.models.load_model`.
    token_budget
        Padded tokens in a batch, at most. Halved, and kept so, when the device runs out of memory.
    """

    def __init__(self, model: Model, token_budget: int) -> None:
        self.model = model
        self.token_budget = token_budget

    def score(self, queries: Sequence[str | None], passages: Sequence[str | None]) -> Scored:
        """Score pairs ``[n]``. A row that cannot be scored gets an error; the others their score."""
        out = Scored(np.full(len(queries), np.nan, dtype=np.float32))
        rows = self._complete_rows(queries, passages, out)
        tokens = self._tokenize(rows, queries, passages, out)
        for token_rows, tokenized in tokens:
            for batch in plan_batches(tokenized.lengths, self.token_budget):
                self._run(batch, tokenized, token_rows, out)
        return out

    def _complete_rows(
        self, queries: Sequence[str | None], passages: Sequence[str | None], out: Scored
    ) -> list[int]:
        complete = []
        for row, (query, passage) in enumerate(zip(queries, passages, strict=True)):
            if query is None or passage is None:
                out.errors[row] = "query is null" if query is None else "passage is null"
            else:
                complete.append(row)
        return complete

    def _tokenize(
        self, rows: list[int], queries: Sequence[str | None], passages: Sequence[str | None], out: Scored
    ) -> list[tuple[Rows, Tokens]]:
        """Tokens of the rows, in as few pieces as the rows that break the tokenizer allow."""
        pieces: list[tuple[Rows, Tokens]] = []

        def tokenize(part: Rows) -> None:
            texts = [queries[row] or "" for row in part], [passages[row] or "" for row in part]
            pieces.append((part, self.model.tokenizer(*texts)))

        if rows:
            _bisect(np.asarray(rows), tokenize, out.errors, "tokenizer")
        return pieces

    def _run(self, batch: Rows, tokens: Tokens, rows: Rows, out: Scored) -> None:
        """Forward one planned batch and scatter its scores to `rows`."""

        def forward(part: Rows) -> None:
            self._forward(part, tokens, rows, out)

        errors: dict[int, str] = {}
        _bisect(batch, forward, errors, "model")
        out.errors.update({int(rows[row]): reason for row, reason in errors.items()})

    def _forward(self, part: Rows, tokens: Tokens, rows: Rows, out: Scored) -> None:
        padded = tokens.pad(part, self.model.tokenizer.pad_id)
        try:
            logits = self.model.backend.submit(padded).result()
        except OutOfMemory:
            if len(part) == 1:
                raise
            self.token_budget = min(self.token_budget, padded.ids.size) // 2
            for smaller in plan_batches(tokens.lengths[part], self.token_budget):
                self._forward(part[smaller], tokens, rows, out)
            return
        scores = self.model.activation(logits)
        out.scores[rows[part]] = scores
        for row in rows[part[~np.isfinite(scores)]]:
            out.errors[int(row)] = f"the model's output is not a number in {self.model.backend.precision}"
        out.scores[rows[part[~np.isfinite(scores)]]] = np.nan
        out.tokens += int(tokens.lengths[part].sum())
        out.padded_tokens += padded.ids.size
        out.batches += 1


def _bisect(rows: Rows, run: Callable[[Rows], None], errors: dict[int, str], stage: str) -> None:
    """`run` the rows; where that raises, halve them until the row that raises stands alone."""
    try:
        run(rows)
    except SpecError:
        raise
    except Exception as error:
        if len(rows) == 1:
            errors[int(rows[0])] = f"{stage}: {type(error).__name__}: {' '.join(str(error).split())}"
            return
        middle = len(rows) // 2
        _bisect(rows[:middle], run, errors, stage)
        _bisect(rows[middle:], run, errors, stage)
