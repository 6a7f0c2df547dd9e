"""How rankings are compared: what is counted, how sure it is, and which rows it is counted on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill.extensions.lab.agreement import agreement
from rankmill.extensions.lab.pairs import draw


def test_spearman_is_the_mean_over_queries() -> None:
    queries = ["a", "a", "a", "b", "b", "alone"]
    reference = np.array([1, 2, 3, 1, 2, 5], np.float32)
    same = agreement(queries, reference * 10, reference)
    assert same
    assert (same.spearman, same.low, same.high) == pytest.approx((1, 1, 1))
    assert (same.queries, same.rows, same.top_overlap) == (2, 5, None)
    other = np.array([2, 1, 3, 2, 1, 5], np.float32)  # 0.5 in a, -1 in b; nothing to rank in the last
    found = agreement(queries, other, reference)
    assert found
    assert found.spearman == pytest.approx(-0.25)
    assert agreement(["a", "b"], reference[:2], reference[:2]) is None


def test_rows_without_a_score_are_left_out() -> None:
    queries = ["a"] * 4 + ["b"] * 2
    reference = np.array([1, 2, 3, 4, 1, 2], np.float32)
    found = agreement(queries, np.array([np.nan, 3, 2, 1, 1, 2], np.float32), reference)  # -1 in a, 1 in b
    assert found
    assert found.spearman == pytest.approx(0)
    assert found.rows == 5
    assert agreement(queries, np.full(6, np.nan, np.float32), reference) is None


@pytest.mark.parametrize("queries", [1, 3, 19, 20])
def test_equal_rankings_keep_any_threshold(queries: int) -> None:
    names, scores, _ = noisy(queries, 0)
    same = agreement(names, scores, 2 * scores)
    assert same
    assert (same.low, same.spearman, same.high, same.verdict(1)) == (1, 1, 1, "kept")


def test_the_first_ten_are_compared_as_a_set() -> None:
    """One query swaps its first two, another its 10th and 11th; the third is too short to tell."""
    reference = np.arange(12, 0, -1).astype(np.float32)
    swapped, moved = reference.copy(), reference.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    moved[[9, 10]] = moved[[10, 9]]
    queries = ["a"] * 12 + ["b"] * 12 + ["c"] * 2
    found = agreement(
        queries, np.concatenate([swapped, moved, [1, 2]]), np.concatenate([reference] * 2 + [[2, 1]])
    )
    assert found
    assert found.top_overlap == pytest.approx(0.95)


def noisy(queries: int, seed: int, noise: float = 0.05) -> tuple[list[str], np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    reference = random.normal(size=50 * queries).astype(np.float32)
    scores = reference + noise * random.normal(size=len(reference)).astype(np.float32)
    return [str(row // 50) for row in range(len(reference))], scores, reference


@pytest.mark.parametrize("queries", [4, 40])
def test_the_interval_holds_the_truth(queries: int) -> None:
    truth = agreement(*noisy(1000, 0))
    assert truth
    held = 0
    for seed in range(1, 41):
        found = agreement(*noisy(queries, seed))
        assert found
        assert found.low <= found.spearman <= found.high
        held += found.low <= truth.spearman <= found.high
    assert held >= 34  # 38 of 40, if it were exact


def test_a_verdict_needs_rows_enough() -> None:
    few, many = agreement(*noisy(4, 1)), agreement(*noisy(400, 1))
    assert few
    assert many
    near = many.spearman - 0.0002
    assert few.verdict(near) == "undecided"
    assert few.rows_wanted(near) > few.rows
    assert many.verdict(near) == "kept"
    assert few.verdict(0.9) == "kept"
    assert few.verdict(0.9999) == many.verdict(0.9999) == "lost"


@given(st.lists(st.sampled_from("abc"), max_size=300), st.integers(0, 300))
def test_a_sample_has_each_row_once_and_fifty_of_a_query_at_first(queries: list[str], rows: int) -> None:
    places = draw(queries, rows)
    assert len(places) == len(set(places)) == min(rows, len(queries))
    counts, all_of = Counter(queries[place] for place in places), Counter(queries)
    if any(counts[query] > 50 for query in counts):  # only when each of the others has its fifty
        assert all(counts[query] >= min(50, all_of[query]) for query in all_of)
    assert draw(queries, rows) == places
