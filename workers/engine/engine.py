"""Pairs in, scores out: tokenize, plan, forward, scatter.

>>> engine = Engine(load_model(ScoreSpec(model="demo"), "cpu"), token_budget=16384)
>>> engine.score(["how far is the moon"], ["About 384,000 km."]).scores  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankmill.jobs.contract.errors import RowFault, too_long
from rankmill.jobs.contract.proof import Way
from rankmill.jobs.contract.wire import MAX_CHUNK_BYTES
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost, Logits, OutOfMemory, Pending
from rankmill.workers.batches.planner import Rows, WaitingRows
from rankmill.workers.batches.tokens import Batch, Tokens, pad, padded_lengths
from rankmill.workers.engine.budget import BatchSizes, BudgetSearch
from rankmill.workers.engine.headroom import Headroom
from rankmill.workers.host import metrics
from rankmill.workers.models.loading import Model

PROVE_SECONDS = 3600.0
"""Time after which the probes are scored again, while work comes."""

ERROR_SECONDS = 60.0
"""The same after an error of the model or the device."""

_MOST_FOUND = MAX_CHUNK_BYTES // 2
"""Bytes of what is found of a chunk that asks for tokens; its result has to be read as a payload is."""


@dataclass
class PairScores:
    """Scores of `n` pairs, with the tokens and batches that they took.

    ``scores`` is float32, ``[n]`` or ``[n, labels]``; NaN for the rows in ``errors``, row to reason.
    ``tokens`` counts real tokens, ``padded_tokens`` real tokens and padding. ``batches`` counts the
    batches with at least one of the pairs. ``windows`` counts the windows of the ``cut`` passages.
    ``counted``: the worker's metrics count them.
    """

    scores: npt.NDArray[np.float32]
    errors: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    windows: int = 0
    cut: int = 0
    counted: bool = True

    def fail(self, row: int, kind: RowFault, reason: str) -> None:
        """Set the error of a row."""
        self.errors[row] = reason
        if self.counted:
            metrics.row_errors.labels(kind).inc()


@dataclass(eq=False)
class Work:
    """The pairs of a chunk in the engine: their tokens, and their scores so far.

    ``rows[i]`` is the number of the pair in row ``i`` of ``tokens``; a pair has a row for each window.
    ``left`` is how many rows are not scored yet. ``seconds`` are those of its stages, by name. ``apart``:
    the scores of the rows, where the mean of a pair's windows counts. ``found``: what was found of each row
    that asks for tokens, as JSON.
    """

    tokens: Tokens
    rows: Rows
    scored: PairScores
    left: int
    seconds: dict[str, float] = field(default_factory=dict)
    apart: Logits | None = None
    found: list[str | None] | None = None

    @property
    def row_tokens(self) -> npt.NDArray[np.int32]:
        """Tokens of each pair ``[n]``, of all of its windows; 0 for one that was not tokenized."""
        return np.bincount(self.rows, self.tokens.lengths, len(self.scored.scores)).astype(np.int32)

    @property
    def done(self) -> int:
        """Pairs that are scored; those of several windows count in parts."""
        rows = len(self.rows)
        return (rows - self.left) * (rows - self.scored.windows + self.scored.cut) // rows if rows else 0


Part = tuple[Work, Rows]
"""Some rows of one `Work`, as indices into its ``tokens``."""


@dataclass(frozen=True)
class Flight:
    """A batch whose forward has begun, or could not begin (then ``pending`` is the error)."""

    parts: list[Part]
    pending: Pending | Exception


def rows_in(parts: list[Part]) -> int:
    """Rows of a batch."""
    return sum(len(rows) for _, rows in parts)


def longest_in(parts: list[Part]) -> int:
    """Tokens of the longest row of a batch."""
    return max(int(work.tokens.lengths[rows].max()) for work, rows in parts)


def tokens_in(parts: list[Part]) -> int:
    """Tokens of a batch without padding."""
    return sum(int(work.tokens.lengths[rows].sum()) for work, rows in parts)


class Engine:
    """Scores pairs with one model.

    Parameters
    ----------
    model
        From `rankmill.workers.models.loading.load_model`.
    token_budget
        Padded tokens in a batch, at most. It is halved for good when the device runs out of memory.
    max_batch, length_aware
        As in `rankmill.workers.batches.planner.plan_batches`.
    search
        Finds a better token budget, for `adapt`.
    headroom
        Knows which batches fit into memory; others are cut before they run.
    short_batches
        Whether batches of a slow model are smaller, so that each takes half a second (`BatchSizes`).
    way
        How rows share a forward; ``None``: as it was proven.
    counted
        Whether the worker's metrics count what it scores.
    """

    def __init__(
        self,
        model: Model,
        token_budget: int,
        *,
        max_batch: int | None = None,
        length_aware: bool = True,
        search: BudgetSearch | None = None,
        headroom: Headroom | None = None,
        short_batches: bool = False,
        way: Way | None = None,
        counted: bool = True,
    ) -> None:
        self.model = model
        self._way = way or (model.proof.way if model.proof else None)
        self._counted = counted
        self._proven, self._had_errors = system.monotonic(), False
        self.token_budget = token_budget
        self._search = search
        self._headroom = headroom or Headroom()
        self._max_batch = max_batch
        self._length_aware = length_aware
        self._sizes = BatchSizes(short_batches=short_batches)
        self._row = model.inputs.removesuffix("s")

    def score(
        self, queries: Sequence[str | None], passages: Sequence[str | None] | None = None
    ) -> PairScores:
        """Score pairs ``[n]``. A row that cannot be scored gets an error; the other rows get scores."""
        work = self.prepare(queries, passages)
        waiting = WaitingRows[Work]()
        self.queue(work, waiting)
        flights: list[Flight] = []
        while waiting.batches or flights:
            if waiting.batches:
                flights.append(self.submit(waiting.take()))
            if not waiting.batches or len(flights) >= self.model.backend.depth:
                self.finish(flights.pop(0))
        return work.scored

    def queue(self, work: Work, waiting: WaitingRows[Work], *, whole: bool = False) -> None:
        """Add the rows of `work` to `waiting`, cut into batches by this engine's limits."""
        groups, budget = self._groups(work.tokens), self._budget(work.tokens)
        lengths = work.tokens.lengths if groups is None else work.tokens.costs
        waiting.add(
            work, lengths, budget, max_batch=self._max_batch, length_aware=self._length_aware,
            mixed_batches=self._sizes.batches(budget), whole=whole, groups=groups,
            packed=self.model.backend.packs,
        )  # fmt: skip

    def _groups(self, tokens: Tokens) -> Rows | None:
        """Which rows share a prefix that is computed once; ``None`` if none is."""
        if tokens.shared is None or tokens.groups is None or not self.model.backend.shares_prefixes:
            return None
        return np.where(tokens.shared > 0, tokens.groups, 0)

    def _budget(self, tokens: Tokens) -> int:
        """Padded tokens in a batch of such rows; those that share a prefix gain from large batches."""
        if self._groups(tokens) is not None:
            return self.token_budget
        return self._sizes.budget(self.token_budget)

    def prepare(self, queries: Sequence[str | None], passages: Sequence[str | None] | None = None) -> Work:
        """Tokenize pairs ``[n]``, or what is scored alone; rows that cannot be get an error and are done."""
        scored = PairScores(self.model.no_scores(len(queries)), counted=self._counted)
        complete = self._without_nulls(queries, passages, scored)
        pieces: list[tuple[Rows, Tokens]] = []

        def tokenize(part: Rows) -> None:
            places = part.tolist()
            asked = [queries[row] or "" for row in places]
            read = None if passages is None else [passages[row] or "" for row in places]
            counts = np.ones(len(part), np.intp)
            if self.model.short_passages and read is not None:
                read = self.model.short_passages.cut(read)
            if self.model.windows:
                of, asked, read = self.model.windows.cut(asked, read)
                counts, part = np.bincount(of), part[of]
            tokens = self.model.tokenizer(asked, read)
            if not tokens.lengths.all():
                raise ValueError(f"the {self._row} has no tokens")
            pieces.append(self._fitting(part, tokens, scored))
            scored.windows += int(counts[counts > 1].sum())
            scored.cut += int((counts > 1).sum())

        def broken(row: int, reason: str) -> None:
            scored.fail(row, "tokenizer", f"tokenizer: {reason}")

        bisect(complete, tokenize, broken)
        rows = np.concatenate([np.zeros(0, np.intp), *(part for part, _ in pieces)])
        work = Work(Tokens.join([tokens for _, tokens in pieces]), rows, scored, len(rows))
        if self.model.averages and scored.windows:
            work.apart = self.model.no_scores(len(rows))
        return work

    def encode(self, asked: Sequence[str | None]) -> Work:
        """Find tokens ``[n]``, or their texts. The work is done; scores are the numbers of tokens."""
        assert self.model.encoder
        encoder, room = self.model.encoder, _MOST_FOUND
        scored = PairScores(self.model.no_scores(len(asked)), counted=self._counted)
        found: list[str | None] = [None] * len(asked)

        def encode(part: Rows) -> None:
            nonlocal room
            places = part.tolist()
            for row, each in zip(places, encoder([asked[row] or "" for row in places]), strict=True):
                text = each.model_dump_json()
                room -= len(text.encode())
                if room < 0:
                    scored.fail(row, "tokenizer", "tokenizer: there are too many tokens for one result")
                    continue
                found[row], scored.scores[row] = text, len(each.ids)
                scored.tokens += len(each.ids)

        def broken(row: int, reason: str) -> None:
            scored.fail(row, "tokenizer", f"tokenizer: {reason}")

        bisect(self._without_nulls(asked, None, scored), encode, broken)
        return Work(Tokens.join([]), np.zeros(0, np.intp), scored, 0, found=found)

    def _without_nulls(
        self, queries: Sequence[str | None], passages: Sequence[str | None] | None, scored: PairScores
    ) -> Rows:
        """The rows that have texts; the others get an error."""
        columns = (queries,) if passages is None else (queries, passages)
        alike = len(set(map(len, columns))) == 1
        if alike and not any(None in column for column in columns):
            return np.arange(len(queries))
        complete = []
        for row, texts in enumerate(zip(*columns, strict=True)):
            if None in texts:
                name = self._row if passages is None else ("query", "passage")[texts.index(None)]
                scored.fail(row, "null", f"{name} is null")
            else:
                complete.append(row)
        return np.asarray(complete, dtype=np.intp)

    def _fitting(self, part: Rows, tokens: Tokens, scored: PairScores) -> tuple[Rows, Tokens]:
        """The pairs of `part` that are not refused, and their tokens; the others get an error."""
        most = self.model.refused_over
        if most is None or (fits := tokens.lengths <= most).all():
            return part, tokens
        for row, length in zip(part[~fits].tolist(), tokens.lengths[~fits].tolist(), strict=True):
            scored.fail(row, "too_long", too_long(self._row, length, most))
        return part[fits], tokens.take(np.flatnonzero(fits))

    def submit(self, parts: list[Part]) -> Flight:
        """Begin the forward of a batch; raises `DeviceLost`."""
        if rows_in(parts) > self._headroom.most_rows(longest_in(parts)):
            return Flight(parts, _TooLarge())
        try:
            return Flight(parts, self._begin(parts))
        except DeviceLost:
            raise
        except Exception as error:  # `finish` handles it, in the order of the batches
            return Flight(parts, error)

    def finish(self, flight: Flight) -> list[Work]:
        """Wait for a batch and scatter its scores; returns the works that it completes.

        Raises
        ------
        DeviceLost
            The device failed; this process cannot score any more.
        """
        try:
            if isinstance(flight.pending, Exception):
                raise flight.pending
            self._scatter(flight.parts, flight.pending.result())
        except DeviceLost:
            raise
        except _TooLarge:
            self._cut(flight.parts)
        except _Unlike:
            self._run_again(flight.parts, _by_length(flight.parts))
        except Exception as error:
            self._recover(flight.parts, error)
        for work, rows in flight.parts:
            work.left -= len(rows)
            if work.apart is not None and not work.left:
                work.scored.scores[:] = _means(work.apart, work.rows, len(work.scored.scores))
            work.scored.scores[list(work.scored.errors)] = np.nan  # also where another window has a score
        return [work for work, _ in flight.parts if not work.left]

    def may_adapt(self, flight: Flight, seconds: float) -> bool:
        """Record the time of a batch; returns whether it is time to call `adapt`."""
        self._sizes.see(self._planned(flight.parts), seconds)
        return self._search is not None and self._search.see(
            rows_in(flight.parts), tokens_in(flight.parts), seconds
        )

    @property
    def _pads(self) -> bool:
        """Whether rows of a batch are padded to one length: not where they are packed, or computed alone."""
        return not (self.model.backend.packs or self.model.kind)

    def _planned(self, parts: list[Part]) -> int:
        """Tokens of a batch as the token budget counts them."""
        return rows_in(parts) * longest_in(parts) if self._pads else tokens_in(parts)

    def _computed(self, parts: list[Part]) -> list[int]:
        """Tokens that are computed for each part of a batch, with padding."""
        lengths = [work.tokens.lengths[rows] for work, rows in parts]
        if not self._pads:
            return [int(some.sum()) for some in lengths]
        padded = padded_lengths(np.concatenate(lengths), self.model.backend.pieces)
        return [int(some.sum()) for some in np.split(padded, np.cumsum([len(some) for some in lengths])[:-1])]

    def adapt(self, flight: Flight) -> None:
        """Find the best token budget, with batches like that of `flight`; raises `DeviceLost`.

        It takes seconds. No other forward may be in progress.
        """
        if self._search is not None:
            self.token_budget = self._search.find(self._padded(flight.parts), self._headroom.most_rows)
            self._search = None

    @property
    def must_prove(self) -> bool:
        """Whether it is time to call `prove`: an hour after the last time, a minute after an error."""
        seconds = system.monotonic() - self._proven
        return self.model.prove_again is not None and (
            seconds > PROVE_SECONDS or (self._had_errors and seconds > ERROR_SECONDS)
        )

    def prove(self) -> None:
        """Score the probes again.

        Raises
        ------
        ScoresChanged
            They are not the model's own any more.
        DeviceLost
            The device failed.
        """
        if self.model.prove_again is not None and not (proof := self.model.prove_again()).holds:
            raise ScoresChanged(str(proof))
        self._proven, self._had_errors = system.monotonic(), False

    def _padded(self, parts: list[Part]) -> Batch:
        return pad([(work.tokens, rows) for work, rows in parts], self.model.tokenizer.pad_id)

    def _begin(self, parts: list[Part]) -> Pending:
        if self._way == "equal" and len(_by_length(parts)) > 1:
            raise _Unlike
        return self._headroom.submit(self.model.backend, self._padded(parts))

    def _cut(self, parts: list[Part]) -> None:
        """Run a batch that was not expected to fit in pieces that do."""
        rows, length, done = rows_in(parts), longest_in(parts), 0
        self._headroom.log_cut(rows, length)
        while done < rows:
            end = min(done + self._headroom.most_rows(length), rows)
            self._run_again(parts, [np.arange(done, end)])
            done = end

    def _recover(self, parts: list[Part], error: Exception) -> None:
        """Bisect a failed batch until its parts fit into memory and each row that fails is found."""
        if isinstance(error, OutOfMemory):
            self._shrink_budget(parts)
        else:
            self._had_errors = True
        rows = rows_in(parts)
        self._run_again(parts, np.array_split(np.arange(rows), min(2, rows)))

    def _run_again(self, parts: list[Part], pieces: list[Rows]) -> None:
        """Run pieces of a batch, given as places of its rows, one after the other; bisect what fails."""
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

        for piece in pieces:
            bisect(piece, again, broken)

    def _shrink_budget(self, parts: list[Part]) -> None:
        """Lower the token budget to half of the tokens of `parts`, and stop searching a better one."""
        costs = [work.tokens.costs[rows].max() for work, rows in parts]
        needed = int(max(costs)) * rows_in(parts)
        self.token_budget = max(1, min(self.token_budget, needed // 2))
        self._search = None

    def _scatter(self, parts: list[Part], logits: Logits) -> None:
        scores = self.model.activation(logits)
        computed, done = self._computed(parts), 0
        for (work, rows), mine_computed in zip(parts, computed, strict=True):
            mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows]
            done += len(rows)
            finite = np.isfinite(mine).reshape(len(mine), -1).all(axis=1)
            if work.apart is not None:
                work.apart[rows[finite]] = mine[finite]
            else:
                np.fmax.at(out.scores, places[finite], mine[finite])  # the best of a pair's windows
            for place in places[~finite].tolist():
                precision = self.model.backend.precision
                out.fail(place, "not_a_number", f"the model's output is not a number in {precision}")
            out.tokens += int(work.tokens.lengths[rows].sum())
            out.padded_tokens += mine_computed
            out.batches += 1
        if self._counted:
            budget = self._budget(parts[0][0].tokens)
            metrics.count_batch(done, tokens_in(parts), sum(computed), budget)


class ScoresChanged(Exception):
    """The probes have other scores than when the model was loaded: the device computes wrong things."""


class _TooLarge(Exception):
    """A batch is not expected to fit into memory."""


class _Unlike(Exception):
    """A batch has rows of several lengths, and the model's scores depend on padding."""


def _means(scores: Logits, of: Rows, count: int) -> Logits:
    """The mean score of each of `count` pairs, always in one order; `of` says of which pair a window is."""
    sums = np.zeros((count, *scores.shape[1:]))
    np.add.at(sums, of, scores)
    with np.errstate(invalid="ignore"):
        means = sums.T / np.bincount(of, minlength=count)
    return means.T.astype(np.float32)


def _by_length(parts: list[Part]) -> list[Rows]:
    """Places of a batch's rows, those of equal lengths together."""
    lengths = np.concatenate([work.tokens.lengths[rows] for work, rows in parts])
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]


def bisect(rows: Rows, run: Callable[[Rows], None], broken: Callable[[int, str], None]) -> None:
    """`run` the rows; if that raises, bisect them and call `broken` for each single row that fails."""
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
        bisect(rows[:middle], run, broken)
        bisect(rows[middle:], run, broken)
