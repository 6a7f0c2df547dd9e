"""Pairs in, scores out: tokenize, plan, forward, scatter.

>>> engine = Engine(load_model(ScoreSpec(model="demo"), "cpu"), token_budget=16384)
>>> engine.score(["how far is the moon"], ["About 384,000 km."]).scores  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers import metrics
from workers.backends.base import DeviceLost, Logits, OutOfMemory, Pending
from workers.engine.budget import BudgetSearch
from workers.engine.planner import Rows
from workers.engine.rows import WaitingRows
from workers.models.loading import Model
from workers.models.tokens import Batch, Tokens, pad


@dataclass
class Scored:
    """Scores of `n` pairs and what they cost.

    ``scores`` is float32 of shape ``[n]``, NaN where ``errors`` (row to reason) says why.
    ``tokens`` were real; ``padded_tokens`` were computed, padding included; ``batches`` had at
    least one of the pairs.
    """

    scores: npt.NDArray[np.float32]
    errors: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0

    def fail(self, row: int, kind: str, reason: str) -> None:
        """Give a row an error, of one of the kinds that `metrics.ROW_ERRORS` names."""
        self.errors[row] = reason
        metrics.row_errors.labels(kind).inc()


@dataclass(eq=False)
class Work:
    """Pairs on their way: their tokens, and the scores so far.

    ``rows[i]`` is the pair whose tokens are row ``i`` of ``tokens``; ``left`` rows of it are not
    scored yet.
    """

    tokens: Tokens
    rows: Rows
    scored: Scored
    left: int


Part = tuple[Work, Rows]
"""Rows, by their place in ``tokens``, of one piece of work."""


@dataclass(frozen=True)
class Flight:
    """A batch whose forward was begun."""

    parts: list[Part]
    pending: Pending | Exception


class Engine:
    """Scores pairs with one model.

    Parameters
    ----------
    model
        From `workers.models.loading.load_model`.
    token_budget
        Padded tokens in a batch, at most. Halved, and kept so, when the device runs out of memory.
    max_batch, length_aware
        As in `workers.engine.planner.plan_batches`.
    search
        Finds a better token budget, for `adapt`.
    """

    def __init__(
        self,
        model: Model,
        token_budget: int,
        *,
        max_batch: int | None = None,
        length_aware: bool = True,
        search: BudgetSearch | None = None,
    ) -> None:
        self.model = model
        self.token_budget = token_budget
        self._search = search
        self._max_batch = max_batch
        self._length_aware = length_aware

    def score(self, queries: Sequence[str | None], passages: Sequence[str | None]) -> Scored:
        """Score pairs ``[n]``. A row that cannot be scored gets an error; the others their score."""
        work = self.prepare(queries, passages)
        pool = WaitingRows[Work]()
        self.queue(work, pool)
        flights: list[Flight] = []
        while pool.batches or flights:
            if pool.batches:
                flights.append(self.submit(pool.take()))
            if not pool.batches or len(flights) >= self.model.backend.depth:
                self.finish(flights.pop(0))
        return work.scored

    def queue(self, work: Work, pool: WaitingRows[Work]) -> None:
        """Let the rows of `work` wait in `pool`, cut into batches as this engine likes them."""
        lengths, budget = work.tokens.lengths, self.token_budget
        pool.add(work, lengths, budget, max_batch=self._max_batch, length_aware=self._length_aware)

    def prepare(self, queries: Sequence[str | None], passages: Sequence[str | None]) -> Work:
        """Tokenize pairs ``[n]``; those that cannot be tokenized have their error and are done."""
        scored = Scored(np.full(len(queries), np.nan, dtype=np.float32))
        complete = []
        for row, (query, passage) in enumerate(zip(queries, passages, strict=True)):
            if query is None or passage is None:
                scored.fail(row, "null", "query is null" if query is None else "passage is null")
            else:
                complete.append(row)
        pieces: list[tuple[Rows, Tokens]] = []

        def tokenize(part: Rows) -> None:
            texts = [queries[row] or "" for row in part], [passages[row] or "" for row in part]
            pieces.append((part, self.model.tokenizer(*texts)))

        def broken(row: int, reason: str) -> None:
            scored.fail(row, "tokenizer", f"tokenizer: {reason}")

        _bisect(np.asarray(complete, dtype=np.intp), tokenize, broken)
        rows = np.concatenate([np.zeros(0, np.intp), *(part for part, _ in pieces)])
        return Work(Tokens.join([tokens for _, tokens in pieces]), rows, scored, len(rows))

    def submit(self, parts: list[Part]) -> Flight:
        """Begin the forward of a batch; raises `DeviceLost`."""
        try:
            return Flight(parts, self._begin(parts))
        except DeviceLost:
            raise
        except Exception as error:  # for `finish` to deal with, when its turn comes
            return Flight(parts, error)

    def finish(self, flight: Flight) -> list[Work]:
        """Wait for a batch and scatter its scores; the works that are complete with it.

        Raises
        ------
        DeviceLost
            Nothing can be scored by this process any more.
        """
        try:
            if isinstance(flight.pending, Exception):
                raise flight.pending
            self._scatter(flight.parts, flight.pending.result())
        except DeviceLost:
            raise
        except Exception as error:
            self._recover(flight.parts, error)
        for work, rows in flight.parts:
            work.left -= len(rows)
        return [work for work, _ in flight.parts if not work.left]

    def may_adapt(self, flight: Flight, seconds: float) -> bool:
        """Take note that a batch took so long; whether it is time for `adapt`."""
        if self._search is None:
            return False
        tokens = sum(int(work.tokens.lengths[rows].sum()) for work, rows in flight.parts)
        return self._search.see(sum(len(rows) for _, rows in flight.parts), tokens, seconds)

    def adapt(self, flight: Flight) -> None:
        """Find the best token budget, with batches like that of `flight`; raises `DeviceLost`.

        Takes seconds. Nothing else must be under way.
        """
        if self._search is not None:
            self.token_budget = self._search.find(self._padded(flight.parts))
            self._search = None

    def _padded(self, parts: list[Part]) -> Batch:
        return pad([(work.tokens, rows) for work, rows in parts], self.model.tokenizer.pad_id)

    def _begin(self, parts: list[Part]) -> Pending:
        return self.model.backend.submit(self._padded(parts))

    def _recover(self, parts: list[Part], error: Exception) -> None:
        """Run the halves of a batch that failed, until they fit and the row that raises stands alone."""
        flat = [(work, row) for work, rows in parts for row in rows.tolist()]

        def again(places: Rows) -> None:
            some = [(flat[place][0], np.asarray([flat[place][1]])) for place in places]
            try:
                self._scatter(some, self._begin(some).result())
            except OutOfMemory:
                self._shrink_budget(some)
                raise

        def broken(place: int, reason: str) -> None:
            work, row = flat[place]
            work.scored.fail(int(work.rows[row]), "model", f"model: {reason}")

        if isinstance(error, OutOfMemory):
            self._shrink_budget(parts)
        for half in np.array_split(np.arange(len(flat)), min(2, len(flat))):
            _bisect(half, again, broken)

    def _shrink_budget(self, parts: list[Part]) -> None:
        """Half of what the parts needed, from now on."""
        needed = _longest(parts) * sum(len(rows) for _, rows in parts)
        self.token_budget = max(1, min(self.token_budget, needed // 2))
        self._search = None

    def _scatter(self, parts: list[Part], logits: Logits) -> None:
        scores = self.model.activation(logits)
        longest = _longest(parts)
        real = done = 0
        for work, rows in parts:
            mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows]
            done += len(rows)
            finite = np.isfinite(mine)
            out.scores[places] = np.where(finite, mine, np.nan)
            for place in places[~finite].tolist():
                precision = self.model.backend.precision
                out.fail(place, "not_a_number", f"the model's output is not a number in {precision}")
            mine_real = int(work.tokens.lengths[rows].sum())
            real += mine_real
            out.tokens += mine_real
            out.padded_tokens += longest * len(rows)
            out.batches += 1
        metrics.count_batch(done, real, longest * done, self.token_budget)


def _longest(parts: list[Part]) -> int:
    return max(int(work.tokens.lengths[rows].max()) for work, rows in parts)


def _bisect(rows: Rows, run: Callable[[Rows], None], broken: Callable[[int, str], None]) -> None:
    """`run` the rows; where that raises, halve them until the row that raises stands alone."""
    if not len(rows):
        return
    try:
        run(rows)
    except DeviceLost:
        raise
    except Exception as error:
        if len(rows) == 1:
            broken(int(rows[0]), f"{type(error).__name__}: {' '.join(str(error).split())}")
            return
        middle = len(rows) // 2
        _bisect(rows[:middle], run, broken)
        _bisect(rows[middle:], run, broken)
