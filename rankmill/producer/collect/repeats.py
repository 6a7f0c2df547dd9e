"""Pairs whose scores need no work, because an earlier output has the scores or another row asks for them.

If several rows in the window have the same pair, one chunk asks for its score on behalf of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.results import ChunkResult, ChunkScores, ChunkStats
from rankmill.producer.collect.scored import RowResults, ScoredTable, row_results, scored_table

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]

Answer = tuple[float | list[float] | None, str | None, int | None]
"""Score, error and tokens of a pair; either score or error is null, and tokens are null if unknown."""

NOBODY = -1
"""Stands for a row's number where no row asks for a pair."""

_WORD = 8
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=4, dtype=np.uint64) | np.uint64(1)
_OF_QUERY, _OF_LENGTH, _OF_FIRST, _OF_LAST = _FACTORS
"""Odd numbers of 64 bits by which the parts of a key are multiplied."""

_NO_WORK = {
    "attempt": 1,
    "tokens": 0,
    "padded_tokens": 0,
    "batches": 0,
    "seconds": 0.0,
    "tokenize_seconds": 0.0,
    "forward_seconds": 0.0,
    "device_seconds": 0.0,
    "windows": 0,
}
"""Values in the statistics of a chunk for which no worker had any work."""


class EarlierScores:
    """The scores of an earlier output. A pair is found by a digest of 128 bits, which takes 20 bytes of
    memory with its score.

    Parameters
    ----------
    columns
        The columns of query and passage.
    keys
        The digests of the pairs, ``[n, 2]``.
    scores
        The scores of the pairs, ``[n]``.
    made
        The output's metadata, which say how the scores were made.
    """

    def __init__(
        self, columns: tuple[str, ...], keys: Keys, scores: Scores, made: Mapping[str, str] | None = None
    ) -> None:
        order = np.argsort(keys[:, 0], kind="stable")
        self.columns, self.made = columns, made or {}
        self._keys, self._scores = keys[order], scores[order]

    def __len__(self) -> int:
        return len(self._scores)

    @property
    def kind(self) -> str | None:
        """For a deterministic output, what decides the bits of its scores (`ChunkStats.kind`)."""
        return self.made.get("rankmill.kind")

    def digests(self, table: pa.Table) -> Keys:
        return _digests([table[name] for name in self.columns])

    def known(self, keys: Keys) -> pa.Array:
        """The known score of each pair, by the pair's digest; null if the score is not known."""
        if not len(self):
            return pa.nulls(len(keys), pa.float32())
        places = np.minimum(np.searchsorted(self._keys[:, 0], keys[:, 0]), len(self) - 1)
        missing = (self._keys[places] != keys).any(axis=1)
        return pa.array(self._scores[places], mask=missing)


def no_earlier(columns: tuple[str, ...]) -> EarlierScores:
    """Make an object without scores, for pairs in these columns."""
    return EarlierScores(columns, np.zeros((0, 2), np.uint64), np.zeros(0, np.float32))


def read_earlier(
    batches: Iterable[pa.RecordBatch],
    columns: tuple[str, ...],
    score: str,
    made: Mapping[str, str] | None = None,
) -> EarlierScores:
    """Read the pairs and scores of an output; rows without a score are left out.

    Parameters
    ----------
    batches
        The rows of the output, with the columns that are named below.
    columns, score
        The columns of query and passage, and of the scores.
    made
        As in `EarlierScores`.
    """
    keys, scores = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.float32)]
    for batch in batches:
        kept = batch.filter(batch[score].is_valid())
        keys.append(_digests([pa.chunked_array([kept[name]]) for name in columns]))
        scores.append(np.asarray(kept[score]).astype(np.float32))
    return EarlierScores(columns, np.concatenate(keys), np.concatenate(scores), made)


def _digests(columns: list[pa.ChunkedArray]) -> Keys:
    texts = [as_bytes(column).to_pylist() for column in columns]
    queries = {text: blake2b(_bytes(text), digest_size=16).digest() for text in set(texts[0])}
    if len(texts) == 1:
        joined = b"".join(map(queries.__getitem__, texts[0]))
    else:
        joined = b"".join(
            blake2b(_bytes(passage), digest_size=16, key=queries[query]).digest()
            for query, passage in zip(*texts, strict=True)
        )
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def _bytes(text: bytes | None) -> bytes:
    return b"\0" if text is None else b"\1" + text


def pair_keys(table: pa.Table, columns: tuple[str, ...]) -> Keys:
    """A multiple of four for each row's pair, equal for equal pairs.

    The number is made from the lengths of the texts and from their first and last eight bytes, which is
    several times as fast as a hash of everything. So pairs whose texts differ only elsewhere have the same
    number.
    """
    return _joined(*(_of_places(as_bytes(table[name])) for name in columns))


def whole_keys(table: pa.Table, columns: tuple[str, ...]) -> Keys:
    """Keys like those of `pair_keys`, but made from the whole texts. The keys are valid only in this process,
    and differ from all keys of `pair_keys`.
    """
    return _joined(*(_hashes(as_bytes(table[name])) for name in columns)) + np.uint64(1)


def as_bytes(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The texts of a column of any text type, as bytes."""
    kind = column.type
    return (column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column).cast(pa.binary())


def _joined(query: Keys, *passage: Keys) -> Keys:
    keys: Keys = reduce(np.bitwise_xor, passage, query * _OF_QUERY) & ~np.uint64(3)
    return keys


def _of_places(texts: pa.ChunkedArray) -> Keys:
    return np.concatenate([np.zeros(0, np.uint64), *map(_of_places_in, texts.chunks)])


def _of_places_in(texts: pa.BinaryArray) -> Keys:
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    keys: Keys = lengths.view(np.uint64) * _OF_LENGTH
    is_short = lengths < _WORD
    if data is not None and data.size >= _WORD:
        words = np.ndarray((data.size - _WORD + 1,), "<u8", np.frombuffer(data, np.uint8), strides=(1,))
        room = np.maximum(lengths - _WORD, 0)  # this is 0 for short texts, whose words are not used
        starts = np.minimum(starts, len(words) - 1)
        keys += words[starts] * _OF_FIRST + words[starts + room] * _OF_LAST
    if is_short.any():
        keys[is_short] = _hashes(texts.filter(pa.array(is_short)))
    return keys


def _hashes(texts: pa.Array | pa.ChunkedArray) -> Keys:
    objects = texts.to_numpy(zero_copy_only=False)
    return np.fromiter(map(hash, objects), np.int64, len(objects)).view(np.uint64)


class Answers(NamedTuple):
    """Answers to pairs by their keys, the type of the scores, and the statistics of their chunk, if known."""

    by_key: Mapping[int, Answer]
    kind: pa.DataType
    stats: ChunkStats | None


@dataclass
class ChunkPairs:
    """The distinct pairs of a chunk without a known score, and the answers to them.

    ``rows`` are the first rows that have these pairs. ``places`` has, for each row of the chunk, the index of
    the row's pair, or null if the row's score is ``known``. The chunk itself asks for its ``own`` pairs, and
    other chunks ask for the rest, whose ``keys`` are in ``missing`` until their answers come.
    """

    rows: Numbers
    places: pa.Array
    known: pa.Array
    keys: Keys
    own: npt.NDArray[np.bool_]
    missing: set[int] = field(default_factory=set)
    result: ChunkResult | None = None
    """The worker's result for the chunk's own pairs."""
    answers: dict[int, Answer] = field(default_factory=dict)
    kind: pa.DataType = field(default_factory=pa.float32)
    elsewhere: ChunkStats | None = None
    """Statistics of the last answers from another chunk."""

    @property
    def is_complete(self) -> bool:
        return not self.missing and (self.result is not None or not self.own.any())

    def select(self, table: pa.Table) -> pa.Table:
        """The rows of the chunk's table that this chunk asks for itself."""
        return table.take(pa.array(self.rows[self.own]))

    def add(self, answers: Answers) -> None:
        self.answers.update(answers.by_key)
        self.missing.difference_update(answers.by_key)
        if answers.stats:
            self.kind, self.elsewhere = answers.kind, answers.stats

    def whole(self, chunk: int) -> ChunkScores | None:
        """The result of all rows, for the journal; ``None`` if the chunk's own pairs have failed, or if no
        statistics are known.
        """
        if isinstance(self.result, ChunkScores):
            stats = self.result.stats
        elif self.result is None and self.elsewhere:
            stats = self.elsewhere.model_copy(update=_NO_WORK)
        else:
            return None
        results = self._row_results()
        return ChunkScores(chunk, results.scores, results.errors, stats, results.tokens)

    def table(self, table: pa.Table) -> ScoredTable:
        return scored_table(table, self.result, self._row_results(), len(table) - self.known.null_count)

    def _row_results(self) -> RowResults:
        if not len(self.rows):
            return RowResults(self.known, pa.nulls(len(self.known), pa.string()))
        results = self._distinct_results().take(self.places)
        if self.known.null_count == len(self.known):
            return results
        return results._replace(scores=pc.coalesce(self.known, results.scores))

    def _distinct_results(self) -> RowResults:
        own: Iterator[Answer] = iter(())
        kind = self.kind
        if self.result is not None:
            mine = row_results(self.result, int(self.own.sum()))
            if self.own.all():
                return mine
            own = _answers(mine)
            kind = mine.scores.type if isinstance(self.result, ChunkScores) else kind
        answers = [
            next(own) if is_own else self.answers[key]
            for key, is_own in zip(self.keys.tolist(), self.own, strict=True)
        ]
        scores, errors, tokens = zip(*answers, strict=True)
        counted = None if all(count is None for count in tokens) else pa.array(tokens, pa.int32())
        return RowResults(pa.array(scores, kind), pa.array(errors, pa.string()), counted)


def _answers(results: RowResults) -> Iterator[Answer]:
    tokens = [None] * len(results.scores) if results.tokens is None else results.tokens.to_pylist()
    return zip(results.scores.to_pylist(), results.errors.to_pylist(), tokens, strict=True)


def distinct_pairs(table: pa.Table, columns: tuple[str, ...], scores: pa.Array, keys: Keys) -> ChunkPairs:
    """The distinct pairs of a chunk that itself asks for all of them.

    Parameters
    ----------
    table, columns
        The chunk, and its columns with queries and passages.
    scores, keys
        The known score of each row, or null; the key of each row's pair.
    """
    pairs, *others = [_codes(table[name]) for name in columns]
    for codes in others:
        pairs = pairs * (int(codes.max(initial=0)) + 1) + codes
    unknown = np.flatnonzero(np.asarray(pc.is_null(scores)))
    _, first, source = np.unique(pairs[unknown], return_index=True, return_inverse=True)
    order = np.argsort(first)  # this restores the order of the chunk
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    places = np.full(len(table), -1, np.int64)
    places[unknown] = place[source]
    rows = unknown[first[order]]
    return ChunkPairs(rows, pa.array(places, mask=places < 0), scores, keys[rows], np.ones(len(rows), bool))


def _codes(column: pa.ChunkedArray) -> Numbers:
    """Numbers that are equal for equal texts."""
    whole = column.combine_chunks()
    if pa.types.is_dictionary(whole.type):
        whole = whole.cast(whole.type.value_type)
    indices = pc.dictionary_encode(whole, null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)


class _Asking(NamedTuple):
    rows: pa.Table
    keys: Keys


class RepeatedPairs:
    """Knows which chunk asks for a pair, and which other chunks wait for the pair's answer.

    For a chunk that has neither repeated pairs nor known scores, this only computes keys and looks them up.

    Parameters
    ----------
    columns
        The columns of the query and the passage.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._asking: dict[int, _Asking] = {}
        """The rows that each chunk asks for, in the order of the chunks. A row's number is the chunk's number
        plus its index in the chunk.
        """
        self._asked: dict[int, int] = {}
        """The numbers of all rows that chunks ask for, by their keys."""
        self._waiting: dict[int, list[int]] = {}
        """The chunks that wait for a pair which another chunk asks for, by the pair's key."""
        self._unlike = count(2, 4)
        """Keys for pairs whose own keys equal those of other pairs; no other pair has one of these."""

    def enter(self, chunk: int, table: pa.Table, scores: pa.Array | None) -> ChunkPairs | None:
        """Note a new chunk, and decide which of its pairs it asks for itself.

        Parameters
        ----------
        chunk, table
            The chunk, and its rows.
        scores
            The known scores; ``None`` if no score is known.

        Returns
        -------
        The pairs; ``None`` if the chunk asks for all of its rows.
        """
        keys = pair_keys(table, self._columns)
        if scores is None:
            if not _alike(keys, self._asked).any():
                self._ask(chunk, table, keys)
                return None
            scores = pa.nulls(len(table), pa.float32())
        pairs = distinct_pairs(table, self._columns, scores, keys)
        rows = pairs.select(table)
        elsewhere = self._asked_elsewhere(rows, pairs.keys)
        self._tell_apart(rows, pairs.keys, elsewhere)
        pairs.own, pairs.missing = ~elsewhere, set(pairs.keys[elsewhere].tolist())
        for key in pairs.missing:
            self._waiting.setdefault(key, []).append(chunk)
        if pairs.own.any():
            self._ask(chunk, pairs.select(table), pairs.keys[pairs.own])
        return pairs

    def _ask(self, chunk: int, rows: pa.Table, keys: Keys) -> None:
        self._asking[chunk] = _Asking(rows, keys)
        self._asked.update(zip(keys.tolist(), range(chunk, chunk + len(keys)), strict=True))

    def _tell_apart(self, rows: pa.Table, keys: Keys, elsewhere: npt.NDArray[np.bool_]) -> None:
        """Give a new key to each of the chunk's own pairs whose key is also that of a different pair."""
        places = np.flatnonzero(~elsewhere)
        if len(alike := places[_alike(keys[places], self._asked)]):
            others = rows.take(pa.array(alike))
            keys[alike] = whole_keys(others, self._columns)
            elsewhere[alike] = self._asked_elsewhere(others, keys[alike])
            unlike = alike[~elsewhere[alike]]
            for place in unlike[_alike(keys[unlike], self._asked)].tolist():
                keys[place] = next(self._unlike)

    def _asked_elsewhere(self, rows: pa.Table, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which rows have a pair that another chunk asks for; the texts decide this, not the keys."""
        elsewhere = np.zeros(len(keys), bool)
        numbers = _numbers(keys, self._asked)
        matches = np.flatnonzero(numbers != NOBODY)
        chunks = np.fromiter(self._asking, np.int64)
        askers = chunks[np.searchsorted(chunks, numbers[matches], "right") - 1]
        for asker in np.unique(askers).tolist():
            here = matches[askers == asker]
            theirs = self._asking[asker].rows.take(pa.array(numbers[here] - asker))
            elsewhere[here] = self._same(rows.take(pa.array(here)), theirs)
        return elsewhere

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
        The answers, by the chunks that wait for them.
        """
        keys = self._asking.pop(chunk).keys.tolist()
        for key in keys:
            del self._asked[key]
        wanted = [row for row, key in enumerate(keys) if key in self._waiting]
        if not wanted:
            return {}
        whole, rows = row_results(result, len(keys)), pa.array(wanted)
        stats = result.stats if isinstance(result, ChunkScores) else None
        by_chunk: dict[int, dict[int, Answer]] = {}
        for row, answer in zip(wanted, _answers(whole.take(rows)), strict=True):
            key = keys[row]
            for other in self._waiting.pop(key):
                by_chunk.setdefault(other, {})[key] = answer
        return {other: Answers(answers, whole.scores.type, stats) for other, answers in by_chunk.items()}


def _numbers(keys: Keys, numbers: Mapping[int, int]) -> Numbers:
    """For each key, the number of the row that asks for it, or `NOBODY`."""
    return np.array([numbers.get(key, NOBODY) for key in keys.tolist()], np.int64)


def _alike(keys: Keys, numbers: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Which keys are also in `numbers`, or belong to an earlier row too."""
    alike: npt.NDArray[np.bool_] = _numbers(keys, numbers) != NOBODY
    ordered = np.sort(keys)  # this is ten times as fast as np.unique
    if (ordered[1:] == ordered[:-1]).any():
        repeated = np.ones(len(keys), bool)
        repeated[np.unique(keys, return_index=True)[1]] = False
        alike |= repeated
    return alike
