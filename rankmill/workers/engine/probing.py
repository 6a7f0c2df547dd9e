"""How a loaded model scores the probes: the way of every pair, in several companies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from rankmill.jobs.contract.proof import Way
from rankmill.workers.backends.base import Logits
from rankmill.workers.batches.planner import Rows, WaitingRows
from rankmill.workers.batches.tokens import Ids, Tokens
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.work import PairScores, Work, prepare
from rankmill.workers.models.loading import Model
from rankmill.workers.models.probes import SCORED, Probe, columns_of

_BUDGET = 1024
"""Padded tokens in a batch of probes."""

_UNLIKE = 3
"""Batches of unlike rows that all probes but the longest are dealt into."""

_BESIDE_LONGEST = 2
"""Probes that are scored beside the longest: each of them costs as much."""

_ALIKE = 2
"""Groups of probes that begin alike, which are scored in one batch."""

_COME_AGAIN = 9
"""Times that packed batches come: with the ninth, if not before, a graph of their shape is replayed."""

_ALONE = 8
"""Probes that are also scored alone, from the shortest on: beside others they have most padding."""


class Probed:
    """Logits of the probes by one way.

    Parameters
    ----------
    model
        Scores in all outputs, with the identity as activation.
    way
        How rows share a forward.

    Attributes
    ----------
    companies
        Logits ``[probes, outputs]`` in batches as they are planned, beside unlike rows, and alone; then, if
        rows share beginnings, beside such rows; if they are packed, as planned again and again. NaN where a
        probe was not scored.
    tokens
        Digests of the probes' token ids; of a probe without tokens that of none.
    errors
        Probes without a score, and why.
    """

    def __init__(self, model: Model, way: Way) -> None:
        self._engine = Engine(model, _BUDGET, way=way, counted=False)
        work = prepare(model, *columns_of(SCORED, model.inputs), counted=False)
        self._tokens, self._rows, self.errors = work.tokens, work.rows, dict(work.scored.errors)
        self.tokens = [digest([])] * len(SCORED)
        for row, ids in zip(work.rows.tolist(), _ids(work.tokens), strict=True):
            self.tokens[row] = digest(ids)
        planned = self._planned()
        turned = [[rows[::-1] for rows in planned], planned]  # other rows, of the same shape
        batches = [planned, _unlike(work.tokens), _alone(work.tokens)]
        if model.backend.shares_prefixes and work.tokens.groups is not None and len(work.rows):
            batches.append([_alike(work.tokens.groups)])
        batches += [turned[turn % 2] for turn in range(1, _COME_AGAIN)] if way == "packed" else []
        self.companies = [self._in_batches(each) for each in batches]
        lost = np.setdiff1d(np.arange(len(work.rows)), [row for rows in planned for row in rows])
        self.errors.update((row, "it is in no batch") for row in work.rows[lost].tolist())

    def _planned(self) -> list[Rows]:
        """Batches as the engine plans them."""
        waiting, batches = WaitingRows[Work](), []
        work = Work(self._tokens, self._rows, PairScores(np.zeros(0, np.float32)), len(self._rows))
        self._engine.queue(work, waiting)
        while waiting.batches:
            batches += [rows for _, rows in waiting.take()]
        return batches

    def _in_batches(self, batches: Sequence[Rows]) -> Logits:
        scored = PairScores(self._engine.model.no_scores(len(SCORED)), counted=False)
        work = Work(self._tokens, self._rows, scored, len(self._rows))
        for rows in batches:
            self._engine.finish(self._engine.submit([(work, rows)]))
        self.errors.update(scored.errors)
        return scored.scores.reshape(len(SCORED), -1)


def tokens_of(model: Model, probes: Sequence[Probe]) -> list[str]:
    """Digests of the token ids of probes."""
    return [digest(ids) for ids in _ids(model.tokenizer(*columns_of(probes, model.inputs)))]


def digest(value: object) -> str:
    """A short digest of numbers and texts."""
    return blake2b(repr(value).encode(), digest_size=16).hexdigest()


def _ids(tokens: Tokens) -> Iterator[list[int]]:
    for start, end in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
        yield tokens.ids[start:end].tolist()


def _unlike(tokens: Tokens) -> list[Rows]:
    """Batches whose rows have very different lengths."""
    order = np.argsort(-tokens.lengths, kind="stable")
    longest, others = order[:1], order[1:]
    beside = others[-_BESIDE_LONGEST:]  # the shortest
    rest = others[:-_BESIDE_LONGEST]
    return [np.concatenate([longest, beside]), *(rest[first::_UNLIKE] for first in range(_UNLIKE))]


def _alike(groups: Ids) -> Rows:
    """Rows that begin alike, of several beginnings, in one batch: what they share is worth computing once."""
    _, of, members = np.unique(groups, return_inverse=True, return_counts=True)
    return np.flatnonzero(np.isin(of, np.argsort(-members, kind="stable")[:_ALIKE]))


def _alone(tokens: Tokens) -> list[Rows]:
    """The shortest rows, each in a batch of its own."""
    order = np.argsort(tokens.lengths, kind="stable")
    return [order[place : place + 1] for place in range(min(_ALONE, len(order)))]
