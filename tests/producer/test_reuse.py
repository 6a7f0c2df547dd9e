"""Scores without work: known pairs, and pairs that a chunk repeats."""

from __future__ import annotations

from operator import length_hint
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.results import ChunkFailure, ChunkScores
from rankmill.producer.collect import repeats
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.repeats import (
    EarlierScores,
    distinct_pairs,
    no_earlier,
    pair_keys,
    read_earlier,
)
from rankmill.producer.collect.sizing import WindowSize
from tests.harness.queue_by_hand import STATS, QueueByHand, pairs

COLUMNS = ("query", "passage")
TEXTS = st.sampled_from([None, "", "a", "b", "a\0", "\0b", "long " * 30])
PAIRS = st.lists(st.tuples(TEXTS, TEXTS), max_size=30)


def table(pairs: list[tuple[str | None, str | None]], *, dictionary: bool = False) -> pa.Table:
    columns = [pa.array([pair[side] for pair in pairs], pa.string()) for side in (0, 1)]
    if dictionary:
        columns[0] = columns[0].dictionary_encode()
    return pa.table(columns, names=list(COLUMNS))


def earlier(pairs: list[tuple[str | None, str | None]], scores: list[float | None]) -> EarlierScores:
    scored = table(pairs).append_column("score", pa.array(scores, pa.float32()))
    return read_earlier(scored.to_batches(7), COLUMNS, "score")


@given(PAIRS, st.sets(st.integers(0, 29)), st.booleans())
def test_every_row_gets_the_score_of_its_pair(
    pairs: list[tuple[str | None, str | None]], known: set[int], dictionary: bool
) -> None:
    numbers = {pair: float(number) for number, pair in enumerate(dict.fromkeys(pairs))}
    have = [numbers[pair] if row in known else None for row, pair in enumerate(pairs)]
    asked = distinct_pairs(
        table(pairs, dictionary=dictionary),
        COLUMNS,
        pa.array(have, pa.float32()),
        pair_keys(table(pairs), COLUMNS),
    )
    sent = [pairs[row] for row in asked.rows]
    assert sent == list(dict.fromkeys(pair for row, pair in enumerate(pairs) if have[row] is None))
    assert asked.select(table(pairs)).equals(table(sent)) or not sent
    if not sent:
        assert asked.table(table(pairs)).scores.to_pylist() == have
        return
    scores = pa.array([None if pair == ("a", "b") else numbers[pair] for pair in sent], pa.float32())
    errors = pa.array(["bad" if pair == ("a", "b") else None for pair in sent], pa.string())
    asked.result = ChunkScores(7, scores, errors, STATS)
    part, whole = asked.table(table(pairs)), asked.whole(0)
    assert whole
    for row, pair in enumerate(pairs):
        is_bad = pair == ("a", "b") and have[row] is None
        expected = (None, "bad") if is_bad else (numbers[pair], None)
        assert (part.scores[row].as_py(), part.errors[row].as_py()) == expected
    assert (whole.chunk, whole.scores, whole.errors) == (0, part.scores, part.errors)
    assert part.reused == sum(score is not None for score in have)
    asked.result = ChunkFailure(chunk=7, message="died", fatal=False, attempts=3)
    failed = asked.table(table(pairs))
    assert failed.scores.to_pylist() == have
    assert failed.errors.to_pylist() == ["died" if score is None else None for score in have]


@given(st.dictionaries(st.tuples(TEXTS, TEXTS), st.none() | st.floats(-9, 9, width=32)), PAIRS)
def test_pairs_of_an_earlier_output_are_known(
    scores: dict[tuple[str | None, str | None], float | None],
    pairs: list[tuple[str | None, str | None]],
) -> None:
    found = earlier(list(scores), list(scores.values()))
    assert len(found) == sum(score is not None for score in scores.values())
    assert found.known(found.digests(table(pairs, dictionary=True))).to_pylist() == [
        scores.get(pair) for pair in pairs
    ]


CHUNKS = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=40)
@given(CHUNKS, st.randoms(), st.sampled_from([1, 3, 40]), st.sets(st.integers(0, 11)), st.booleans())
def test_a_pair_of_several_chunks_in_the_window_is_asked_for_once(
    chunks: list[list[int]], random: Random, window: int, failing: set[int], keys_are_alike: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if keys_are_alike:
            patch.setattr(repeats, "pair_keys", lambda table, _: np.full(len(table), 8, np.uint64))
        _check_asked_once(chunks, random, window, failing, strictly=window == 40)


def _check_asked_once(
    chunks: list[list[int]], random: Random, window: int, failing: set[int], *, strictly: bool
) -> None:
    tables = [pa.table({"query": [str(n) for n in chunk], "passage": ["p"] * len(chunk)}) for chunk in chunks]
    queue = QueueByHand(tables, WindowSize(window, 1 << 20), reuse=no_earlier(COLUMNS))
    asker: dict[int, int] = {}
    for place, chunk in enumerate(chunks):
        for number in chunk:
            asker.setdefault(number, place)
    failed = {number for number, place in asker.items() if place in failing} if strictly else set()

    def answer_some() -> None:
        waiting = queue.waiting()
        for chunk in random.sample(waiting, random.randint(min(1, len(waiting)), len(waiting))):
            if failed & {int(query) for query in queue.queries(chunk)}:
                queue.fail(chunk)
            else:
                queue.score(chunk)

    found = queue.scores(answer_some)
    assert found == [None if n in failed else float(n) for chunk in chunks for n in chunk]
    assert [each for each in queue.tokens if each] == [100 + score for score in found if score is not None]
    if strictly:  # all chunks are in the window at once
        assert sorted(map(int, queue.asked)) == sorted({n for chunk in chunks for n in chunk})


def test_scores_of_others_are_kept_for_the_next_command(tmp_path: Path) -> None:
    tables = [pa.table({"query": ["7", "8"], "passage": ["p", "p"]}), *[pairs(1, 7) for _ in range(3)]]
    for asked in (["7", "8"], []):
        journal = Journal(tmp_path / "journal.db")
        queue = QueueByHand(tables, WindowSize(40, 1 << 20), journal, reuse=no_earlier(COLUMNS))
        found = queue.scores(queue.score_all)
        journal.close()
        assert (found, queue.asked) == ([7.0, 8.0, 7.0, 7.0, 7.0], asked)
        assert queue.tokens == [107, 108, 107, 107, 107]


@given(PAIRS)
def test_equal_pairs_have_equal_keys(pairs: list[tuple[str | None, str | None]]) -> None:
    keys = pair_keys(table(pairs), COLUMNS).tolist()
    assert pair_keys(table(pairs, dictionary=True), COLUMNS).tolist() == keys
    assert len(set(keys)) == len(set(pairs))
    alone = [key for pair in pairs for key in pair_keys(table([pair]), COLUMNS).tolist()]
    assert (pair_keys(table(pairs[1:]), COLUMNS).tolist(), alone) == (keys[1:], keys)


@pytest.mark.slow
def test_chunks_that_wait_for_others_are_bounded() -> None:
    same = [pa.table({"query": ["7"], "passage": ["p"]}) for _ in range(500)]
    source = iter(same)
    queue = QueueByHand(same, WindowSize(4, 1 << 20), reuse=no_earlier(COLUMNS), source=source)
    cut = []

    def answer() -> None:
        cut.append(500 - length_hint(source))
        for chunk in queue.waiting():
            queue.score(chunk)

    assert queue.scores(answer) == [7.0] * 500
    assert cut[0] <= 70
    assert len(queue.asked) == len(cut) < 10
