"""Pairs that several rows in the window have: one chunk asks for their score, for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.results import ChunkResult, ChunkScores, ChunkStats
from rankmill.producer.collect.reuse.asked import NOBODY, AskedPairs
from rankmill.producer.collect.reuse.pair_keys import Keys, as_bytes, pair_keys, unlike_keys, whole_keys
from rankmill.producer.collect.reuse.rows import RowsToScore, rows_to_score
from rankmill.producer.collect.scored import ScoredTable, scores_and_errors

Answer = tuple[float | list[float] | None, str | None]
"""Score and error of a pair; one of them is null."""

_NO_WORK = {"attempt": 1, "tokens": 0, "padded_tokens": 0, "batches": 0, "seconds": 0.0, "windows": 0}
"""Statistics of a chunk for which no worker did anything."""


class Answers(NamedTuple):
    """Answers to pairs by their keys, the type of the scores, and the statistics of their chunk, if any."""

    found: Mapping[int, Answer]
    kind: pa.DataType
    stats: ChunkStats | None


@dataclass
class SharedPairs:
    """The distinct pairs of a chunk without a known score, and the answers to them.

    ``asked`` and ``keys`` have an entry for each. ``own`` says for each whether this chunk asks for it;
    another chunk asks for the rest, whose keys are in ``missing`` until their answers are there.
    """

    asked: RowsToScore
    keys: Sequence[int]
    own: npt.NDArray[np.bool_]
    missing: set[int]
    result: ChunkResult | None = None
    answers: dict[int, Answer] = field(default_factory=dict)
    kind: pa.DataType = field(default_factory=pa.float32)
    lent: ChunkStats | None = None
    """How the last answers of another chunk were made."""

    @property
    def is_complete(self) -> bool:
        """Whether all answers are there."""
        return not self.missing and (self.result is not None or not self.own.any())

    def select(self, table: pa.Table) -> pa.Table:
        """The rows that this chunk asks for itself."""
        return self.asked.select(table).filter(pa.array(self.own))

    def add(self, answers: Answers) -> None:
        """Take in answers to pairs that another chunk has asked for."""
        self.answers.update(answers.found)
        self.missing.difference_update(answers.found)
        if answers.stats:
            self.kind, self.lent = answers.kind, answers.stats

    def whole(self, chunk: int) -> ChunkScores | None:
        """The result of all rows for the journal; ``None`` where there are no statistics."""
        if isinstance(self.result, ChunkScores):
            stats = self.result.stats
        elif self.result is None and self.lent:
            stats = self.lent.model_copy(update=_NO_WORK)
        else:
            return None
        return self.asked.whole(chunk, ChunkScores(chunk, *self._found(), stats))

    def table(self, table: pa.Table) -> ScoredTable:
        """The chunk's rows with their scores."""
        return self.asked.table(table, self.result, self._found())

    def _found(self) -> tuple[pa.Array, pa.Array]:
        """Scores and errors of the distinct pairs, in order."""
        own: Iterator[Answer] = iter(())
        kind = self.kind
        if self.result is not None:
            scores, errors = scores_and_errors(self.result, int(self.own.sum()))
            own = zip(scores.to_pylist(), errors.to_pylist(), strict=True)
            kind = self.result.scores.type if isinstance(self.result, ChunkScores) else kind
        found = [
            next(own) if is_own else self.answers[key]
            for key, is_own in zip(self.keys, self.own, strict=True)
        ]
        return pa.array([score for score, _ in found], kind), pa.array(
            [error for _, error in found], pa.string()
        )


class _Asking(NamedTuple):
    """The rows that a chunk without a result asks for, and their keys."""

    rows: pa.Table
    keys: Keys


class Lenders:
    """Which chunk asks for a pair, and which others wait for its answer.

    A chunk in which no pair is repeated costs the keys of its pairs, and looking these up.

    Parameters
    ----------
    columns
        Those of the query and the passage.
    """

    def __init__(self, columns: tuple[str, str]) -> None:
        self._columns = columns
        self._asking: dict[int, _Asking] = {}
        """What chunks ask for, by chunk, in order. The number of a row is the chunk's and its place in it."""
        self._asked = AskedPairs()
        self._waiting: dict[int, list[int]] = {}
        """The chunks that wait for a pair of another one, by the pair's key."""
        self._unlike = unlike_keys()
        """Keys of pairs whose own keys are those of another pair: no other pair has one of these."""

    def share(self, chunk: int, table: pa.Table, known: pa.Array | None) -> SharedPairs | None:
        """The pairs of a new chunk: it asks for those that no row before and no chunk in the window asks for.

        Parameters
        ----------
        chunk, table
            The chunk, and its rows.
        known
            The scores that are known; ``None``: none is.

        Returns
        -------
        The pairs; ``None`` if the chunk asks for all of its rows.
        """
        keys = pair_keys(table, self._columns)
        if known is None:
            if not _alike(keys, self._asked).any():
                self._ask(chunk, table, keys)
                return None
            known = pa.nulls(len(table), pa.float32())
        asked = rows_to_score(table, self._columns, known)
        rows, keys = asked.select(table), keys[asked.rows]
        lent = self._lent(rows, keys)
        self._tell_apart(rows, keys, lent)
        borrowed = keys[lent].tolist()
        for key in borrowed:
            self._waiting.setdefault(key, []).append(chunk)
        shared = SharedPairs(asked, keys.tolist(), ~lent, set(borrowed))
        if not lent.all():
            self._ask(chunk, shared.select(table), keys[shared.own])
        return shared

    def _ask(self, chunk: int, rows: pa.Table, keys: Keys) -> None:
        self._asking[chunk] = _Asking(rows, keys)
        self._asked.add(keys, chunk + np.arange(len(keys)))

    def _tell_apart(self, rows: pa.Table, keys: Keys, lent: npt.NDArray[np.bool_]) -> None:
        """Give each pair that is not lent, but has the key of another pair, a key of its own."""
        places = np.flatnonzero(~lent)
        if len(alike := places[_alike(keys[places], self._asked)]):
            others = rows.take(pa.array(alike))
            keys[alike] = whole_keys(others, self._columns)
            lent[alike] = self._lent(others, keys[alike])
            left = alike[~lent[alike]]
            for place in left[_alike(keys[left], self._asked)].tolist():
                keys[place] = next(self._unlike)

    def _lent(self, rows: pa.Table, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of the rows have a pair that another chunk asks for; the texts decide, not the keys."""
        lent = np.zeros(len(keys), bool)
        numbers = self._asked.find(keys)
        found = np.flatnonzero(numbers != NOBODY)
        chunks = np.fromiter(self._asking, np.int64)
        lenders = chunks[np.searchsorted(chunks, numbers[found], "right") - 1]
        for lender in np.unique(lenders).tolist():
            here = found[lenders == lender]
            there = self._asking[lender].rows.take(pa.array(numbers[here] - lender))
            lent[here] = self._same(rows.take(pa.array(here)), there)
        return lent

    def _same(self, first: pa.Table, second: pa.Table) -> npt.NDArray[np.bool_]:
        same = np.ones(len(first), bool)
        for name in self._columns:
            one, other = as_bytes(first[name]), as_bytes(second[name])
            both_null = pc.and_(pc.is_null(one), pc.is_null(other))
            same &= np.asarray(pc.or_(both_null, pc.fill_null(pc.equal(one, other), False)))
        return same

    def answer(self, chunk: int, result: ChunkResult) -> dict[int, Answers]:
        """Note the result of the rows that a chunk asked for.

        Returns
        -------
        The answers for the chunks that wait for them.
        """
        asking = self._asking.pop(chunk)
        self._asked.remove(asking.keys)
        keys = asking.keys.tolist() if self._waiting else []
        wanted = [row for row, key in enumerate(keys) if key in self._waiting]
        if not wanted:
            return {}
        scores, errors = scores_and_errors(result, len(keys))
        rows = pa.array(wanted)
        stats = result.stats if isinstance(result, ChunkScores) else None
        found: dict[int, dict[int, Answer]] = {}
        for row, score, error in zip(
            wanted, scores.take(rows).to_pylist(), errors.take(rows).to_pylist(), strict=True
        ):
            key = keys[row]
            for each in self._waiting.pop(key):
                found.setdefault(each, {})[key] = (score, error)
        return {each: Answers(answers, scores.type, stats) for each, answers in found.items()}


def _alike(keys: Keys, asked: AskedPairs) -> npt.NDArray[np.bool_]:
    """Which keys are those of pairs that a chunk asks for, or that are in a row before."""
    alike: npt.NDArray[np.bool_] = asked.find(keys) != NOBODY
    ordered = np.sort(keys)  # ten times as quick as np.unique
    if (ordered[1:] == ordered[:-1]).any():
        repeated = np.ones(len(keys), bool)
        repeated[np.unique(keys, return_index=True)[1]] = False
        alike |= repeated
    return alike
