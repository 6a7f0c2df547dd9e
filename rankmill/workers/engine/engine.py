"""The engine of a model: it tokenizes pairs, plans batches, runs forwards, and returns scores in row order.

>>> engine = Engine(load_model(ScoreSpec(model="demo"), "cpu"), 16384)
>>> engine.score(["how far is the moon"], ["About 384,000 km."]).scores  # doctest: +SKIP
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rankmill.jobs.contract.proof import Way
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost, Logits, OutOfMemory, Pending
from rankmill.workers.batches.planner import Rows, WaitingRows
from rankmill.workers.batches.tokens import Batch, Tokens, padded_lengths, put_together
from rankmill.workers.engine.batch_size import BatchSize
from rankmill.workers.engine.work import PairScores, Texts, Work, bisect, prepare, reason_of
from rankmill.workers.host import metrics
from rankmill.workers.models.loading import Model

PROVE_SECONDS = 3600.0
"""While work comes, a model's probes (pairs with known scores) are scored again after this many seconds."""

ERROR_SECONDS = 60.0
"""After a failed batch, a model's probes (pairs with known scores) are scored again at once, unless they were
scored less than this many seconds ago.
"""

Part = tuple[Work, Rows]
"""Some rows of a `Work`, as indices into its ``tokens``."""


@dataclass(frozen=True)
class Flight:
    """A batch whose forward has begun; if it could not begin, ``pending`` is the error."""

    parts: list[Part]
    pending: Pending | Exception


def rows_in(parts: list[Part]) -> int:
    """Return the number of rows of a batch."""
    return sum(len(rows) for _, rows in parts)


def longest_in(parts: list[Part]) -> int:
    """Return the number of tokens of the longest row of a batch."""
    return max(int(work.tokens.lengths[rows].max()) for work, rows in parts)


def tokens_in(parts: list[Part]) -> int:
    """Return the number of tokens of a batch, without padding."""
    return sum(int(work.tokens.lengths[rows].sum()) for work, rows in parts)


class Engine:
    """Scores pairs with one model.

    Parameters
    ----------
    model
        The model, from `rankmill.workers.models.loading.load_model`.
    size
        The size of batches; a number ``n`` means ``BatchSize(n)``.
    length_aware
        Whether to sort rows by length before they are cut into batches.
    way
        The `Way` in which the rows of a batch are computed together, such as ``padded``. The default is that
        of the proof of the model's scores. Without a proof, a batch may have rows of any lengths.
    probing
        Whether the engine scores probes (pairs with known scores). The worker's metrics do not count them.
        `OutOfMemory` is raised for a probe that does not fit into memory by itself, because that says nothing
        about the model's scores.
    """

    def __init__(
        self,
        model: Model,
        size: BatchSize | int,
        *,
        length_aware: bool = True,
        way: Way | None = None,
        probing: bool = False,
    ) -> None:
        self.model = model
        self._way = way or (model.proof.way if model.proof else None)
        self._probing = probing
        self.size = BatchSize(size) if isinstance(size, int) else size
        self._length_aware = length_aware
        self._fitted = model.proof.longest if model.proof else 0
        """Number of tokens of the longest row that has fitted into the device's memory so far."""

    def score(self, queries: Texts, passages: Texts | None = None) -> PairScores:
        """Score pairs ``[n]``, or single texts if `passages` is ``None``. A row that cannot be scored gets an
        error; the other rows get scores. Raises `DeviceLost`.
        """
        work = prepare(self.model, queries, passages)
        waiting = WaitingRows[Work]()
        self.queue(work, waiting)
        self.run(waiting.take_all())
        return work.scored

    def run(self, batches: Iterable[list[Part]]) -> None:
        """Score batches one after the other, with up to `Backend.depth` forwards in progress."""
        flights: deque[Flight] = deque()
        for parts in batches:
            flights.append(self.submit(parts))
            if len(flights) >= self.model.backend.depth:
                self.finish(flights.popleft())
        for flight in flights:
            self.finish(flight)

    def queue(self, work: Work, waiting: WaitingRows[Work], *, whole: bool = False) -> None:
        """Add the rows of `work` to `waiting`, which cuts rows into batches by this engine's limits.

        With `whole`, each work is cut into batches by itself, and only when few batches are left. So `work`
        keeps all of its rows for longer, and can be removed from `waiting` until one of its rows is taken.
        """
        groups, packed = self._groups(work.tokens), self.model.backend.packs
        budget = self.size.tokens(share_prefixes=groups is not None)
        lengths = work.tokens.lengths if groups is None else work.tokens.costs
        mixed = self.size.mixed_batches(budget, packed=packed and groups is None)
        waiting.add(
            work, lengths, budget, max_batch=self.size.max_rows, length_aware=self._length_aware,
            mixed_batches=mixed, whole=whole, groups=groups, packed=packed,
        )  # fmt: skip

    def _groups(self, tokens: Tokens) -> Rows | None:
        """Return a number for each row, equal for rows that share a prefix, and 0 for rows that share
        nothing.

        If the model does not share prefixes, return ``None``.
        """
        if tokens.shared is None or tokens.groups is None or not self.model.backend.shares_prefixes:
            return None
        return np.where(tokens.shared > 0, tokens.groups, 0)

    def submit(self, parts: list[Part]) -> Flight:
        """Begin the forward of a batch. Raises `DeviceLost`; `finish` handles all other errors."""
        if rows_in(parts) > self.size.headroom.most_rows(longest_in(parts)):
            return Flight(parts, _TooLarge())
        try:
            return Flight(parts, self._begin(parts))
        except DeviceLost:
            raise
        except Exception as error:  # `finish` handles errors in the order of the batches
            return Flight(parts, error)

    def finish(self, flight: Flight) -> list[Work]:
        """Wait for the forward of a batch, and write the scores into the `Work` of each row. Returns those
        works of the batch that have no row left to score.

        Raises
        ------
        DeviceLost
            The device failed or computes wrong scores; this process can no longer score.
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
            # a pair with an error has no score, even if some of its windows have one
            work.scored.scores[list(work.scored.errors)] = np.nan
        return [work for work, _ in flight.parts if not work.left]

    @property
    def _pads(self) -> bool:
        """Whether the backend pads the rows of a batch to equal lengths."""
        return not (self.model.backend.packs or self.model.kind)

    def _planned(self, parts: list[Part]) -> int:
        """Return the number of tokens of a batch, with padding if there is any."""
        return rows_in(parts) * longest_in(parts) if self._pads else tokens_in(parts)

    def _computed(self, parts: list[Part]) -> list[int]:
        """Return the number of computed tokens, with padding, for each chunk's rows in a batch."""
        lengths = [work.tokens.lengths[rows] for work, rows in parts]
        if not self._pads:
            return [int(some.sum()) for some in lengths]
        padded = padded_lengths(np.concatenate(lengths), self.model.backend.pieces)
        return [int(some.sum()) for some in np.split(padded, np.cumsum([len(some) for some in lengths])[:-1])]

    def see(self, flight: Flight, seconds: float) -> bool:
        """Record how many seconds a batch took, and return whether to call `adapt` now."""
        parts = flight.parts
        return self.size.see(self._planned(parts), rows_in(parts), tokens_in(parts), seconds)

    def adapt(self, flight: Flight) -> None:
        self.size.search(self._batch(flight.parts))

    @property
    def must_prove(self) -> bool:
        """Whether `prove` must be called now, to score the model's probes (pairs with known scores) again.

        True if the probes were last scored more than `PROVE_SECONDS` ago. If a batch has failed since,
        `ERROR_SECONDS` are enough. Always false for a model whose scores were never compared with
        transformers'.
        """
        probes = self.model.last_probes
        seconds = system.monotonic() - probes.at
        return self.model.prove_again is not None and (
            seconds > PROVE_SECONDS or (probes.errors_since and seconds > ERROR_SECONDS)
        )

    def prove(self) -> None:
        """Score the model's probes (pairs with known scores) again, and check the result.

        Does nothing for a model whose scores were never compared with transformers'.

        Raises
        ------
        ScoresChanged
            The scores now differ from transformers' by more than is allowed.
        DeviceLost
            The device failed, or no memory is left for a probe.
        """
        try:
            proof = self.model.prove_again() if self.model.prove_again else None
        except OutOfMemory as error:
            raise DeviceLost(f"no memory is left for the model's probes: {error}") from None
        if proof is not None and not proof.holds:
            raise ScoresChanged(self.model, str(proof))
        self.model.last_probes.at, self.model.last_probes.errors_since = system.monotonic(), False

    def _batch(self, parts: list[Part]) -> Batch:
        return put_together([(work.tokens, rows) for work, rows in parts], self.model.tokenizer.pad_id)

    def _begin(self, parts: list[Part]) -> Pending:
        if self._way == "equal" and len(_by_length(parts)) > 1:
            raise _Unlike
        if self.model.prove_batch:
            proof = self.model.prove_batch(rows_in(parts), self._planned(parts))
            if proof is not None and not proof.holds:
                raise ScoresChanged(self.model, str(proof))
        return self.size.headroom.submit(self.model.backend, self._batch(parts))

    def _cut(self, parts: list[Part]) -> None:
        for start, end in self.size.headroom.pieces(rows_in(parts), longest_in(parts)):
            self._run_again(parts, [np.arange(start, end)])

    def _recover(self, parts: list[Part], error: Exception) -> None:
        """Cut a failed batch into halves and run the halves. Halves that fail are cut again, until all pieces
        fit into memory and every failing row is found.
        """
        if isinstance(error, OutOfMemory):
            self._shrink(parts)
        else:
            self.model.last_probes.errors_since = True
        rows = rows_in(parts)
        self._run_again(parts, np.array_split(np.arange(rows), min(2, rows)))

    def _run_again(self, parts: list[Part], pieces: list[Rows]) -> None:
        """Run pieces of a batch in turn, and bisect a piece that fails. A piece is an array of indices of the
        batch's rows.
        """

        def again(places: Rows) -> None:
            some = _picked(parts, places)
            try:
                self._scatter(some, self._begin(some).result())
            except OutOfMemory as error:
                alone = rows_in(some) == 1 and not self._probing
                if alone and longest_in(some) <= self._fitted and not self._has_room(some):
                    why = f"no memory is left for a row such as it had memory for: {error}"
                    raise DeviceLost(why) from None
                self._shrink(some)
                raise
            except _Unlike:
                raise
            except Exception:
                self.model.last_probes.errors_since = True
                raise

        def broken(place: int, error: BaseException) -> None:
            if self._probing and isinstance(error, OutOfMemory):
                raise error
            ((work, rows),) = _picked(parts, np.array([place]))
            work.scored.fail(int(work.rows[rows[0]]), "model", f"model: {reason_of(error)}")

        for piece in pieces:
            bisect(piece, again, broken)

    def _has_room(self, part: list[Part]) -> bool:
        """Return whether the device has memory for a row as long as the only row of `part`.

        To find out, this runs another row of the same length.
        """
        rows = self._batch(part).rows
        other = Batch(replace(rows, ids=np.full_like(rows.ids, rows.ids[0])))
        try:
            self.model.backend.submit(other).result()
        except OutOfMemory:
            return False
        return True

    def _shrink(self, parts: list[Part]) -> None:
        if rows_in(parts) == 1:
            return  # one row was too long; batches of shorter rows may still fit
        costs = [work.tokens.costs[rows].max() for work, rows in parts]
        self.size.shrink(int(max(costs)) * rows_in(parts))

    def _scatter(self, parts: list[Part], logits: Logits) -> None:
        scores = self.model.activation(logits)
        self._fitted = max(self._fitted, longest_in(parts))
        computed, done, pairs = self._computed(parts), 0, 0
        for (work, rows), mine_computed in zip(parts, computed, strict=True):
            mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows]
            done += len(rows)
            pairs += work.pairs_in(rows)
            finite = np.isfinite(mine).reshape(len(mine), -1).all(axis=1)
            if work.apart is not None:
                work.apart[rows[finite]] = mine[finite]
            else:
                # the score of a pair is the score of its best window
                np.fmax.at(out.scores, places[finite], mine[finite])
            for place in places[~finite].tolist():
                precision = self.model.backend.precision
                out.fail(place, "not_a_number", f"the model's output is not a number in {precision}")
            out.tokens += int(work.tokens.lengths[rows].sum())
            out.padded_tokens += mine_computed
            out.batches += 1
        if not self._probing:
            budget = self.size.tokens(share_prefixes=self._groups(parts[0][0].tokens) is not None)
            metrics.count_batch(pairs, done, tokens_in(parts), sum(computed), budget)


class ScoresChanged(DeviceLost):
    """A model's probes (pairs with known scores) now have wrong scores, but were right after loading."""

    def __init__(self, model: Model, figures: str) -> None:
        super().__init__(figures)
        self.model = model


class _TooLarge(Exception):
    """A batch is not expected to fit into memory."""


class _Unlike(Exception):
    """A batch has rows of several lengths, and the model's scores depend on padding."""


def _means(scores: Logits, of: Rows, count: int) -> Logits:
    """Return the mean score of each pair over the windows of its passage.

    Parameters
    ----------
    scores
        The scores of the windows.
    of
        Index of each window's pair.
    count
        Number of pairs.
    """
    sums = np.zeros((count, *scores.shape[1:]))
    np.add.at(sums, of, scores)
    with np.errstate(invalid="ignore"):
        means = sums.T / np.bincount(of, minlength=count)
    return means.T.astype(np.float32)


def _picked(parts: list[Part], places: Rows) -> list[Part]:
    """Return some rows of a batch as a smaller batch. Their indices in the batch are `places`, in ascending
    order.
    """
    firsts = np.cumsum([0, *(len(rows) for _, rows in parts)])
    numbers = np.searchsorted(firsts, places, side="right") - 1
    return [
        (parts[number][0], parts[number][1][places[numbers == number] - firsts[number]])
        for number in np.unique(numbers)
    ]


def _by_length(parts: list[Part]) -> list[Rows]:
    lengths = np.concatenate([work.tokens.lengths[rows] for work, rows in parts])
    return [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
