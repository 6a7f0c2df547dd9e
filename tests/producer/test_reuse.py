"""Scores without work: known pairs, and pairs that a chunk repeats."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rankmill.jobs.contract.results import ChunkFailure, ChunkScores
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.scored import EarlierScores, distinct_pairs, no_earlier, read_earlier
from rankmill.producer.collect.sizing import WindowSize
from tests.harness.queue_by_hand import STATS, QueueByHand

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
    asked = distinct_pairs(table(pairs, dictionary=dictionary), COLUMNS, pa.array(have, pa.float32()))
    wanted = list(dict.fromkeys(pair for row, pair in enumerate(pairs) if have[row] is None))
    if asked is None:
        assert wanted == pairs
        return
    sent = [pairs[row] for row in asked.rows]
    assert sent == wanted
    assert asked.select(table(pairs)).equals(table(sent)) or not sent
    if not sent:
        assert asked.table(table(pairs), None).scores.to_pylist() == have
        return
    scores = pa.array([None if pair == ("a", "b") else numbers[pair] for pair in sent], pa.float32())
    errors = pa.array(["bad" if pair == ("a", "b") else None for pair in sent], pa.string())
    scored = ChunkScores(7, scores, errors, STATS)
    part, whole = asked.table(table(pairs), scored), asked.whole(0, scored)
    assert whole
    for row, pair in enumerate(pairs):
        is_bad = pair == ("a", "b") and have[row] is None
        expected = (None, "bad") if is_bad else (numbers[pair], None)
        assert (part.scores[row].as_py(), part.errors[row].as_py()) == expected
    assert (whole.chunk, whole.scores, whole.errors) == (0, part.scores, part.errors)
    assert part.reused == sum(score is not None for score in have)
    failure = ChunkFailure(chunk=7, message="died", fatal=False, attempts=3)
    failed = asked.table(table(pairs), failure)
    assert asked.whole(0, failure) is None
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


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=9), min_size=1, max_size=12),
    st.sets(st.integers(0, 6)),
)
def test_a_pair_is_sent_once_for_each_chunk(chunks: list[list[int]], failing: set[int]) -> None:
    tables = [pa.table({"query": [str(n) for n in chunk], "passage": ["p"] * len(chunk)}) for chunk in chunks]
    queue = QueueByHand(tables, WindowSize(40, 1 << 20), reuse=no_earlier(COLUMNS))

    def answer() -> None:
        for chunk in queue.waiting():
            if failing & {int(query) for query in queue.queries(chunk)}:
                queue.fail(chunk)
            else:
                queue.score(chunk)

    found = queue.scores(answer)
    assert found == [None if failing & {*chunk} else float(n) for chunk in chunks for n in chunk]
    assert [each for each in queue.tokens if each] == [100 + score for score in found if score is not None]
    assert sorted(map(int, queue.asked)) == sorted(n for chunk in chunks for n in {*chunk})


def test_rows_that_were_not_sent_are_in_the_journal(tmp_path: Path) -> None:
    tables = [pa.table({"query": ["7", "8", "7", "7"], "passage": ["p"] * 4})]
    for asked in (["7", "8"], []):
        journal = Journal(tmp_path / "journal.db")
        queue = QueueByHand(tables, WindowSize(40, 1 << 20), journal, reuse=no_earlier(COLUMNS))
        found = queue.scores(queue.score_all)
        journal.close()
        assert (found, queue.asked) == ([7.0, 8.0, 7.0, 7.0], asked)
        assert queue.tokens == [107, 108, 107, 107]
