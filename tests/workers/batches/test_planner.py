"""The planner: every row in one batch, no batch over budget."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankmill.workers.batches.planner import plan_batches

LENGTHS = st.lists(st.integers(1, 600), max_size=300)
BUDGETS = st.integers(1, 5000)


@given(LENGTHS, BUDGETS)
def test_every_row_is_in_exactly_one_batch(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_no_batch_is_over_budget_unless_it_is_one_row(lengths: list[int], budget: int) -> None:
    tokens = np.array(lengths)
    for batch in plan_batches(lengths, budget):
        assert len(batch) == 1 or tokens[batch].max() * len(batch) <= budget


@given(LENGTHS, BUDGETS)
def test_batches_go_from_long_to_short(lengths: list[int], budget: int) -> None:
    order = [lengths[row] for batch in plan_batches(lengths, budget) for row in batch]
    assert order == sorted(lengths, reverse=True)


@given(LENGTHS, BUDGETS)
def test_a_batch_is_as_full_as_it_can_be(lengths: list[int], budget: int) -> None:
    tokens = np.array(lengths)
    for batch in plan_batches(lengths, budget)[:-1]:
        assert (len(batch) + 1) * tokens[batch].max() > budget


@given(LENGTHS, BUDGETS, st.integers(1, 20))
def test_rows_that_are_not_sorted_keep_order_budget_and_most_rows(
    lengths: list[int], budget: int, most: int
) -> None:
    batches = plan_batches(lengths, budget, max_batch=most, length_aware=False)
    assert [row for batch in batches for row in batch.tolist()] == list(range(len(lengths)))
    for batch, following in zip_longest(batches, batches[1:]):
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or (longest * len(batch) <= budget and len(batch) <= most)
        if following is not None:
            full = max(longest, lengths[following[0]]) * (len(batch) + 1) > budget
            assert full or len(batch) == most


def test_padding_is_small_for_lengths_of_real_passages() -> None:
    lengths = np.random.default_rng(0).lognormal(4.4, 0.35, size=10_000).astype(int).clip(10, 512)
    batches = plan_batches(lengths, 4096)
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    assert lengths.sum() / padded > 0.98


def test_a_single_long_row_does_not_widen_the_others() -> None:
    lengths = [8192] + [50] * 1000
    batches = plan_batches(lengths, 4096)
    assert batches[0].tolist() == [0]
    assert sum(len(batch) * 50 for batch in batches[1:]) == 50_000
