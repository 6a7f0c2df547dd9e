"""Scores without work: known pairs, and pairs that a chunk repeats."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import InputError
from jobs.results import ChunkFailure, ChunkScores
from producer.reuse.earlier import EarlierScores, open_earlier
from producer.reuse.rows import rows_to_score
from tests.harness.queue_by_hand import STATS

COLUMNS = ("query", "passage")
TEXTS = st.sampled_from([None, "", "a", "b", "a\0", "\0b", "long " * 30])
PAIRS = st.lists(st.tuples(TEXTS, TEXTS), max_size=30)


def table(pairs: list[tuple[str | None, str | None]], *, dictionary: bool = False) -> pa.Table:
    columns = [pa.array([pair[side] for pair in pairs], pa.string()) for side in (0, 1)]
    if dictionary:
        columns[0] = columns[0].dictionary_encode()
    return pa.table(columns, names=list(COLUMNS))


def earlier(
    tmp: Path, pairs: list[tuple[str | None, str | None]], scores: list[float | None]
) -> EarlierScores:
    pq.write_table(table(pairs).append_column("score", pa.array(scores, pa.float32())), tmp / "e.parquet")
    return open_earlier(tmp / "e.parquet", "e.parquet", COLUMNS, "score")


@given(PAIRS, st.sets(st.integers(0, 29)), st.booleans())
def test_every_row_gets_the_score_of_its_pair(
    pairs: list[tuple[str | None, str | None]], known: set[int], dictionary: bool
) -> None:
    numbers = {pair: float(number) for number, pair in enumerate(dict.fromkeys(pairs))}
    have = [numbers[pair] if row in known else None for row, pair in enumerate(pairs)]
    asked = rows_to_score(table(pairs, dictionary=dictionary), COLUMNS, pa.array(have, pa.float32()))
    sent = [pairs[row] for row in asked.rows]
    assert sent == list(dict.fromkeys(pair for row, pair in enumerate(pairs) if have[row] is None))
    assert asked.select(table(pairs)).equals(table(sent)) or not sent
    if not sent:
        assert asked.table(table(pairs), None).scores.to_pylist() == have
        return
    scores = pa.array([None if pair == ("a", "b") else numbers[pair] for pair in sent], pa.float32())
    errors = pa.array(["bad" if pair == ("a", "b") else None for pair in sent], pa.string())
    result = ChunkScores(7, scores, errors, STATS)
    part, whole = asked.table(table(pairs), result), asked.whole(0, result)
    for row, pair in enumerate(pairs):
        is_bad = pair == ("a", "b") and have[row] is None
        expected = (None, "bad") if is_bad else (numbers[pair], None)
        assert (part.scores[row].as_py(), part.errors[row].as_py()) == expected
    assert (whole.chunk, whole.scores, whole.errors) == (0, part.scores, part.errors)
    assert part.reused == sum(score is not None for score in have)
    failed = asked.table(table(pairs), ChunkFailure(chunk=7, message="died", fatal=False, attempts=3))
    assert failed.scores.to_pylist() == have
    assert failed.errors.to_pylist() == ["died" if score is None else None for score in have]


@given(st.dictionaries(st.tuples(TEXTS, TEXTS), st.none() | st.floats(-9, 9, width=32)), PAIRS)
def test_pairs_of_an_earlier_output_are_known(
    tmp_path_factory: pytest.TempPathFactory,
    scores: dict[tuple[str | None, str | None], float | None],
    pairs: list[tuple[str | None, str | None]],
) -> None:
    found = earlier(tmp_path_factory.mktemp("e"), list(scores), list(scores.values()))
    assert len(found) == sum(score is not None for score in scores.values())
    assert found.known(table(pairs, dictionary=True)).to_pylist() == [scores.get(pair) for pair in pairs]


def test_an_output_without_the_texts_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"query": ["q"], "score": pa.array([1.0])}), tmp_path / "e.parquet")
    with pytest.raises(InputError, match=r"e\.parquet: no column 'passage', which --reuse needs"):
        open_earlier(tmp_path / "e.parquet", "e.parquet", COLUMNS, "score")
