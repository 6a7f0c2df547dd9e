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

_COME_AGAIN = 9
"""How often packed batches are scored, so that a graph of their shape is replayed at least once."""

_ALONE = 8
"""This many of the shortest probes are also scored by themselves, because other rows would pad them most."""


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
        plans, batches of very different lengths, and the shortest probes by themselves.

        If rows share prefixes, one more batch has rows that begin alike. If rows are packed, the planned
        batches are scored again several times. NaN stands for a probe that was not scored. `time` is told how
        long the batches take, and that `then` more seconds follow.
        """
        tokens = self._tokens
        order = np.argsort(-tokens.lengths, kind="stable")
        rest, beside = order[1:-_BESIDE_LONGEST], order[-_BESIDE_LONGEST:]
        unlike = [np.concatenate([order[:1], beside]), *(rest[first::_UNLIKE] for first in range(_UNLIKE))]
        alone = [order[::-1][place : place + 1] for place in range(min(_ALONE, len(order)))]
        planned = self._planned()
        # turned batches have the same shapes, and their rows in the other order
        turned = [[rows[::-1] for rows in planned], planned]
        batches = [planned, unlike, alone]
        if self._model.backend.shares_prefixes and tokens.groups is not None and len(self._rows):
            _, of, members = np.unique(tokens.groups, return_inverse=True, return_counts=True)
            # a backend shares prefixes only if that saves enough, as it does with these groups
            alike = np.isin(of, np.argsort(-members, kind="stable")[:_ALIKE])
            batches.append([np.flatnonzero(alike)])
        batches += [turned[turn % 2] for turn in range(1, _COME_AGAIN)] if self._way == "packed" else []
        every = [rows for company in batches for rows in company]
        timed = time.each(
            every, [len(rows) * int(tokens.lengths[rows].max(initial=0)) for rows in every], then
        )
        logits = [self._in_batches(islice(timed, len(company))) for company in batches]
        lost = np.setdiff1d(np.arange(len(self._rows)), np.concatenate([*planned, np.zeros(0, np.intp)]))
        self.errors.update((row, "it is in no batch") for row in self._rows[lost].tolist())
        return logits

    def repeated(self, rows: int, tokens: int) -> Iterator[tuple[Rows, Logits]]:
        """Yield the indices of probes and their logits, for a batch of this many `rows` and then for one of
        up to this many padded `tokens`.

        The first batch repeats the shortest probes, and the second all probes, beginning with the longest. If
        the rows of a batch must have equal lengths, each batch repeats a single probe. Each batch has two
        works, like a batch of several chunks.
        """
        lengths = self._tokens.lengths
        order = np.argsort(lengths, kind="stable")
        shortest, longest = order[:_ALONE], order[::-1]
        if self._way == "equal":
            shortest, longest = order[:1], order[-1:]
        most = max(tokens // max(int(lengths[longest[0]]), 1), 1)
        for places in (np.resize(shortest, rows), np.resize(longest, most)):
            works = [
                self._work(self._tokens.take(part), np.arange(len(part)))
                for part in np.array_split(places, 2)
                if len(part)
            ]
            engine = self._engine(max(len(places) * int(lengths[places].max()), 1))
            engine.finish(engine.submit([(work, work.rows) for work in works]))
            yield self._rows[places], np.concatenate([self._logits(work) for work in works])

    def _planned(self) -> list[Rows]:
        waiting, batches = WaitingRows[Work](), []
        self._engine(_BUDGET).queue(self._work(self._tokens, self._rows), waiting)
        while waiting.batches:
            batches += [rows for _, rows in waiting.take()]
        return batches

    @property
    def size(self) -> int:
        return int(self._tokens.lengths.sum())

    @property
    def shortest(self) -> int:
        """Most tokens of a row in the first batch of `repeated`."""
        return int(np.sort(self._tokens.lengths)[:_ALONE].max(initial=1))

    def _engine(self, budget: int) -> Engine:
        return Engine(self._model, budget, way=self._way, counted=False)

    def _work(self, tokens: Tokens, rows: Rows, count: int | None = None) -> Work:
        scored = PairScores(self._model.no_scores(len(rows) if count is None else count))
        return Work(tokens, rows, scored, len(rows))

    def _in_batches(self, batches: Iterable[Rows]) -> Logits:
        engine, work = self._engine(_BUDGET), self._work(self._tokens, self._rows, len(SCORED))
        for rows in batches:
            engine.finish(engine.submit([(work, rows)]))
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
