"""Scores the probes (pairs that check a model's scores) as a worker scores all pairs: in several batches,
with other rows beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from rankmill.jobs.contract.proof import Way
from rankmill.workers.backends.base import Logits, OutOfMemory
from rankmill.workers.batches.planner import Rows, WaitingRows
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proof_time import ProofTime
from rankmill.workers.engine.work import PairScores, Work, prepare
from rankmill.workers.host.disk_cache import digest
from rankmill.workers.models.loading import Model
from rankmill.workers.models.probes import SCORED, Probe, columns_of

_BUDGET = 1024
"""Each batch of probes (pairs that check a model's scores) that the engine plans has at most this many padded
tokens.
"""

_UNLIKE = 3
"""Most probes (test pairs) are spread over this many batches, each of which has short and long probes."""

_BESIDE_LONGEST = 2
"""The longest probe (a test pair) shares a batch with only this many other probes, because in a padded batch
each probe costs as much as the longest.
"""

_ALIKE = 2
"""If rows share prefixes, one batch has this many groups of probes (test pairs). The probes of a group begin
alike.
"""

_PACKED_AGAIN = 8
"""Packed batches of probes (test pairs) are scored again this many times, so that their CUDA graphs are used
too.
"""

_ALONE = 8
"""At least this many probes (test pairs), if there are so many, are also scored in batches of one row: a
request may have one row.
"""

_MIDDLE = 4
"""A probe (a test pair) counts as short or middle if it has at most 1/4 of the longest probe's tokens."""

_FEW = 8
"""The first batch of `Probed.repeated` repeats this many of the shortest probes (test pairs). The third batch
repeats the longest of the short and middle probes, at most this many.
"""

_SHARE = 4
"""If rows share prefixes, the last batch of `Probed.repeated` has each probe (test pair) this many times,
because otherwise sharing would not pay.
"""

_WORKS = 4
"""The rows of a large batch of probes (test pairs) come from this many `Work` objects, because the rows of a
worker's large batches come from several chunks, too.
"""


class Probed:
    """Scores the probes, which are the pairs that check a model's scores, beside different other rows.

    Parameters
    ----------
    model
        A model whose scores are the logits of all outputs, because its activation is the identity.
    way
        The `Way` in which the rows of a batch are computed together, such as ``padded``.

    Attributes
    ----------
    tokens
        Digests of the probes' token ids; a probe without tokens has the digest of an empty list.
    errors
        Why a probe has no score, by the probe's index.
    """

    def __init__(self, model: Model, way: Way) -> None:
        self._model, self._way = model, way
        work = prepare(model, *columns_of(SCORED, model.inputs))
        self._tokens, self._rows, self.errors = work.tokens, work.rows, dict(work.scored.errors)
        self.tokens = [digest([])] * len(SCORED)
        for row, ids in zip(work.rows.tolist(), ids_of(work.tokens), strict=True):
            self.tokens[row] = digest(ids)

    def companies(self, time: ProofTime, then: float) -> list[Logits]:
        """Score the probes several times, beside other rows each time.

        Returns the logits ``[probes, outputs]`` of each time, with NaN for a probe that was not scored. The
        sets of batches are, in this order:

        - The batches that the engine plans.
        - Batches that mix short and long probes.
        - Some short probes, each by itself.
        - If all rows of a batch must be equally long: one batch for each length that several probes have.
        - If rows share prefixes: one batch of probes that begin alike.
        - The planned batches with their rows in reverse order.
        - If rows are packed: the planned batches again, by turns in the planned and in reverse order. With
          the set before, these are `_PACKED_AGAIN` sets.

        Parameters
        ----------
        time
            Estimates how long the proof of the model's scores takes.
        then
            Seconds that the proof takes after these batches.
        """
        tokens = self._tokens
        order = np.argsort(-tokens.lengths, kind="stable")
        rest, beside = order[1:-_BESIDE_LONGEST], order[-_BESIDE_LONGEST:]
        unlike = [np.concatenate([order[:1], beside]), *(rest[first::_UNLIKE] for first in range(_UNLIKE))]
        alone = self._middle[:: max(len(self._middle) // _ALONE, 1)][:, None]
        planned = self._planned()
        # in reverse order, and as planned
        turned = [[rows[::-1] for rows in planned], planned]
        batches = [planned, unlike, [*alone]]
        if self._way == "equal":  # the engine cuts the batches above into pieces of one length
            several = np.flatnonzero(np.bincount(tokens.lengths) > 1)
            batches.append([np.flatnonzero(tokens.lengths == length) for length in several])
        if self._model.backend.shares_prefixes and tokens.groups is not None and len(self._rows):
            _, of, members = np.unique(tokens.groups, return_inverse=True, return_counts=True)
            # Not all groups: a backend shares prefixes only if that saves enough.
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
        """Score four large batches that repeat probes, and yield each batch's probes (as indices) and logits.

        - The first batch has `rows` rows, which repeat the shortest probes.
        - The second repeats probes of one length.
        - The third repeats short and middle probes.
        - The last has all probes, the longest first. If rows share prefixes, it has each probe several times.

        The last three have at most `rows` rows and `tokens` padded tokens. If all rows of a batch must be
        equally long, each batch repeats probes of one length.
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
            flight = engine.submit([(work, work.rows) for work in works])
            if isinstance(flight.pending, OutOfMemory):
                raise flight.pending  # the engine would score the batch in halves, which proves less
            engine.finish(flight)
            yield self._rows[places], np.concatenate([self._logits(work) for work in works])

    def _planned(self) -> list[Rows]:
        waiting = WaitingRows[Work]()
        self._engine(_BUDGET).queue(self._work(self._tokens, self._rows), waiting)
        return [rows for parts in waiting.take_all() for _, rows in parts]

    @property
    def _middle(self) -> Rows:
        """Indices of the short and middle probes (see `_MIDDLE`), the shortest first."""
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
        """Number of tokens of the longest probe in the first batch of `repeated`."""
        return int(np.sort(self._tokens.lengths)[:_FEW].max(initial=1))

    def _engine(self, budget: int) -> Engine:
        return Engine(self._model, budget, way=self._way, probing=True)

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
    """Tokenize probes (which all must have a text), and return the digest of each one's token ids."""
    return [digest(ids) for ids in ids_of(prepare(model, *columns_of(probes, model.inputs)).tokens)]


def ids_of(tokens: Tokens) -> Iterator[list[int]]:
    """The token ids of each row."""
    for start, end in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
        yield tokens.ids[start:end].tolist()
