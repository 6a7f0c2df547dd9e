"""Rows of tokens are picked and joined."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankmill.workers.batches.tokens import TokenIds, in_a_row, pieces_of
from rankmill.workers.models.fast_texts import row

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=9)


@given(ROWS, st.data())
def test_picked_rows_have_their_own_tokens(rows: list[list[int]], data: st.DataObject) -> None:
    places = st.integers(0, len(rows) - 1) if rows else st.nothing()
    picked = data.draw(st.lists(places))
    found = in_a_row(rows).take(np.array(picked, np.intp))
    assert [row(found, place).tolist() for place in range(len(picked))] == [rows[place] for place in picked]


@given(st.lists(st.integers(0, 100)), st.sampled_from([np.int32, np.int64]), st.data())
def test_pieces_may_overlap_and_leave_out_numbers(
    numbers: list[int], kind: type[np.int32 | np.int64], data: st.DataObject
) -> None:
    places = st.integers(0, len(numbers))
    bounds = [sorted(pair) for pair in data.draw(st.lists(st.tuples(places, places)))]
    starts = np.array([start for start, _ in bounds], np.int64)
    lengths = np.array([end - start for start, end in bounds], np.int64)
    array: TokenIds = np.array(numbers, kind)
    found = pieces_of(array, starts, lengths)
    assert found.dtype == kind
    assert found.tolist() == [number for start, end in bounds for number in numbers[start:end]]
