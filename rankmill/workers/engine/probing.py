"""Scores the probes as a worker scores all pairs, beside other rows and in several batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from rankmill.jobs.contract.proof import Way
from rankmill.workers.backends.base import Logits
from rankmill.workers.batches.planner import Rows, WaitingRows
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proof_time import ProofTime
from rankmill.workers.engine.work import PairScores, Work, prepare
from rankmill.workers.host.disk_cache import digest
from rankmill.workers.models.loading import Model
from rankmill.workers.models.probes import SCORED, Probe, columns_of

_BUDGET = 1024
"""Padded tokens in a batch of probes."""

_UNLIKE = 3
"""Number of batches whose rows have very different lengths. The batches have all probes except the longest
one and those beside it.
"""

_BESIDE_LONGEST = 2
"""Number of probes that are scored beside the longest one; in a padded batch, each of them costs as much as
the longest.
"""

_ALIKE = 2
"""Number of groups of probes that begin alike and are scored in one batch."""

_PACKED_AGAIN = 8
"""How often packed batches are scored again, so that a graph of their shape is replayed at least once."""

_ALONE = 8
"""At least this many probes of short and middle lengths, or all such probes, are also scored by themselves,
as requests are; other rows would pad these most.
"""

_MIDDLE = 4
"""Rows of a middle length have at most a quarter of the longest probe's tokens, as most pairs have."""

_FEW = 8
"""Number of different probes in a large batch of short rows, or of rows of middle lengths."""

_SHARE = 4
"""How often a large batch repeats each probe if rows share prefixes, so that sharing saves enough."""

_WORKS = 4
"""Number of works in a large batch."""


class Probed:
    """The logits of the probes in one way of sharing a forward.

    Parameters
    ----------
    model
        A model whose scores are the logits of all outputs, because its activation is the identity.
    way
        How rows share a forward.

    Attributes
    ----------
    tokens
        Digests of the probes' token ids; a probe without tokens has the digest of an empty list.
    errors
        The reason for each probe without a score, by the probe's index.
    """

    def __init__(self, model: Model, way: Way) -> None:
        self._model, self._way = model, way
        work = prepare(model, *columns_of(SCORED, model.inputs))
        self._tokens, self._rows, self.errors = work.tokens, work.rows, dict(work.scored.errors)
        self.tokens = [digest([])] * len(SCORED)
        for row, ids in zip(work.rows.tolist(), ids_of(work.tokens), strict=True):
            self.tokens[row] = digest(ids)

    def companies(self, time: ProofTime, then: float) -> list[Logits]:
        """Logits ``[probes, outputs]`` for each of several sets of batches, which are those that the engine
        plans, batches of very different lengths, and some short probes by themselves.

        If all batches must have rows of equal lengths, there are also batches of such probes. If rows share
        prefixes, one more batch has rows that begin alike. The planned batches are scored again with their
        rows in the other order, and several times if rows are packed. NaN stands for a probe that was not
        scored. `time` is told how long the batches take, and that `then` more seconds follow.
        """
        tokens = self._tokens
        order = np.argsort(-tokens.lengths, kind="stable")
        rest, beside = order[1:-_BESIDE_LONGEST], order[-_BESIDE_LONGEST:]
        unlike = [np.concatenate([order[:1], beside]), *(rest[first::_UNLIKE] for first in range(_UNLIKE))]
        alone = self._middle[:: max(len(self._middle) // _ALONE, 1)][:, None]
        planned = self._planned()
        # turned batches have the shapes of the planned ones, and their rows in the other order
        turned = [[rows[::-1] for rows in planned], planned]
        batches = [planned, unlike, [*alone]]
        if self._way == "equal":  # of the batches above, only pieces of one length are scored, in turn
            several = np.flatnonzero(np.bincount(tokens.lengths) > 1)
            batches.append([np.flatnonzero(tokens.lengths == length) for length in several])
        if self._model.backend.shares_prefixes and tokens.groups is not None and len(self._rows):
            _, of, members = np.unique(tokens.groups, return_inverse=True, return_counts=True)
            # a backend shares prefixes only if that saves enough, as it does with these groups
            alike = np.isin(of, np.argsort(-members, kind="stable")[:_ALIKE])
            batches.append([np.flatnonzero(alike)])
        times = _PACKED_AGAIN if self._way == "packed" else 1
        batches += [turned[turn % 2] for turn in range(times)]
        every = [rows for company in batches for rows in company]
        timed = time.each(
            every, [len(rows) * int(tokens.lengths[rows].max(initial=0)) for rows in every], then
        )
        logits = [self._in_batches(islice(timed, len(company))) for company in batches]
        lost = np.setdiff1d(np.arange(len(self._rows)), np.concatenate([*planned, np.zeros(0, np.intp)]))
        self.errors.update((row, "it is in no batch") for row in self._rows[lost].tolist())
        return logits

    def repeated(self, rows: int, tokens: int) -> Iterator[tuple[Rows, Logits]]:
        """Yield the indices of probes and their logits, for a batch of this many `rows` and then for three of
        at most this many rows and padded `tokens`.

        The first batch repeats the shortest probes, and the last one all probes, beginning with the longest.
        Between them, one batch has rows of equal lengths, and one has rows of middle lengths. If all batches
        must have rows of equal lengths, each repeats probes of one length. Each batch has several works, like
        a batch of several chunks. If rows share prefixes, each probe of the last batch comes several times.
        """
        lengths = self._tokens.lengths
        order = np.argsort(lengths, kind="stable")[::-1]
        equal = np.flatnonzero(lengths == np.bincount(lengths).argmax())
        middle = self._middle[-_FEW:][::-1]
        every = np.repeat(order, _SHARE) if self._model.backend.shares_prefixes else order
        fitting = [max(tokens // int(lengths[probes[0]]), 1) for probes in (equal, middle, every)]
        counts = [rows, *np.minimum(fitting, rows).tolist()]
        for probes, count in zip([order[-_FEW:], equal, middle, every], counts, strict=True):
            fits = lengths[probes] == lengths[probes[0]] if self._way == "equal" else slice(None)
            places = np.resize(probes[fits], count)
            works = [
                self._work(self._tokens.take(part), np.arange(len(part)))
                for part in np.array_split(places, _WORKS)
                if len(part)
            ]
            engine = self._engine(max(len(places) * int(lengths[places].max()), 1))
            engine.finish(engine.submit([(work, work.rows) for work in works]))
            yield self._rows[places], np.concatenate([self._logits(work) for work in works])

    def _planned(self) -> list[Rows]:
        waiting = WaitingRows[Work]()
        self._engine(_BUDGET).queue(self._work(self._tokens, self._rows), waiting)
        return [rows for parts in waiting.take_all() for _, rows in parts]

    @property
    def _middle(self) -> Rows:
        """Probes of short and middle lengths, the shortest first."""
        lengths = self._tokens.lengths
        order = np.argsort(lengths, kind="stable")
        most = max(lengths.max(initial=0) // _MIDDLE, lengths[order[:1]].sum())
        middle: Rows = order[lengths[order] <= most]
        return middle

    @property
    def size(self) -> int:
        return int(self._tokens.lengths.sum())

    @property
    def shortest(self) -> int:
        """Most tokens of a row in the first batch of `repeated`."""
        return int(np.sort(self._tokens.lengths)[:_FEW].max(initial=1))

    def _engine(self, budget: int) -> Engine:
        return Engine(self._model, budget, way=self._way, counted=False)

    def _work(self, tokens: Tokens, rows: Rows, count: int | None = None) -> Work:
        scored = PairScores(self._model.no_scores(len(rows) if count is None else count))
        return Work(tokens, rows, scored, len(rows))

    def _in_batches(self, batches: Iterable[Rows]) -> Logits:
        work = self._work(self._tokens, self._rows, len(SCORED))
        self._engine(_BUDGET).run([(work, rows)] for rows in batches)
        self.errors.update(work.scored.errors)
        return self._logits(work)

    def _logits(self, work: Work) -> Logits:
        return work.scored.scores.reshape(len(work.scored.scores), -1)


def tokens_of(model: Model, probes: Sequence[Probe]) -> list[str]:
    """Digests of the token ids of probes, which must all have a text."""
    return [digest(ids) for ids in ids_of(prepare(model, *columns_of(probes, model.inputs)).tokens)]


def ids_of(tokens: Tokens) -> Iterator[list[int]]:
    """The token ids of each row."""
    for start, end in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
        yield tokens.ids[start:end].tolist()
