"""Rows of several works share batches: each once, within the budget, the oldest work first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankmill.workers.batches.planner import WaitingRows

Lengths = st.lists(st.integers(1, 60), max_size=30)


@given(st.lists(Lengths, max_size=8), st.integers(1, 200), st.integers(0, 5), st.sampled_from([None, 1, 4]))
def test_every_row_is_taken_once_and_batches_keep_the_budget(
    works: list[list[int]], budget: int, taken_between: int, mixed: int | None
) -> None:
    waiting = WaitingRows[int]()
    seen: list[tuple[int, int]] = []

    def take() -> None:
        parts = waiting.take()
        rows = [(work, row) for work, mine in parts for row in mine.tolist()]
        longest = max(works[work][row] for work, row in rows)
        assert len(rows) == 1 or longest * len(rows) <= budget
        seen.extend(rows)

    for number, lengths in enumerate(works):
        waiting.add(number, lengths, budget, mixed_batches=mixed)
        for _ in range(taken_between):
            if waiting.batches:  # works that are cut together may make fewer batches than before
                take()
    while waiting.batches:
        take()
    assert sorted(seen) == [(number, row) for number, ls in enumerate(works) for row in range(len(ls))]


@given(
    st.lists(Lengths.filter(bool), min_size=1, max_size=8),
    st.integers(60, 200),
    st.sampled_from([None, 1, 4]),
)
def test_the_oldest_work_is_in_every_batch_until_it_is_done(
    works: list[list[int]], budget: int, mixed: int | None
) -> None:
    waiting = WaitingRows[int]()
    for number, lengths in enumerate(works):
        waiting.add(number, lengths, budget, mixed_batches=mixed)
    left = {number: len(lengths) for number, lengths in enumerate(works)}
    while waiting.batches:
        parts = waiting.take()
        assert min(left) in {work for work, _ in parts}
        for work, rows in parts:
            left[work] -= len(rows)
            if not left[work]:
                del left[work]


def test_small_works_fill_each_other_s_batches() -> None:
    waiting = WaitingRows[int]()
    for number in range(50):
        waiting.add(number, range(20, 40), token_budget=4000)
    batches = []
    while waiting.batches:
        batches.append(waiting.take())
    assert len(batches) <= 9  # 1,000 rows of 29.5 tokens; apart they would make 50


def test_a_work_that_is_removed_leaves_the_others_their_rows() -> None:
    waiting = WaitingRows[str]()
    for name in ("a", "b"):
        waiting.add(name, [5] * 10, token_budget=20)
    taken = waiting.take()
    assert waiting.remove("a") == 10 - sum(len(rows) for work, rows in taken if work == "a")
    assert waiting.remove("a") == 0
    left = 0
    while waiting.batches:
        for work, rows in waiting.take():
            assert work == "b"
            left += len(rows)
    assert left == 10 - sum(len(rows) for work, rows in taken if work == "b")


def test_works_are_finished_one_after_the_other() -> None:
    """Of unfinished works, no more tokens are scored than one mixture has; little is padded for it."""
    rng = np.random.default_rng(0)
    works = [np.clip(rng.lognormal(4.4, 0.45, 100), 8, 512).astype(int) for _ in range(40)]

    def score(mixed_batches: int | None) -> tuple[int, float]:
        waiting = WaitingRows[int]()
        for number, lengths in enumerate(works):
            waiting.add(number, lengths, 2048, mixed_batches=mixed_batches)
        scored = [0] * len(works)
        most = padded = 0
        while waiting.batches:
            parts = waiting.take()
            padded += sum(len(rows) for _, rows in parts) * max(
                works[work][rows].max() for work, rows in parts
            )
            for work, rows in parts:
                scored[work] += int(works[work][rows].sum())
            whole = [int(lengths.sum()) for lengths in works]
            most = max(most, sum(some for some, all_ in zip(scored, whole, strict=True) if some < all_))
        return most, 1 - sum(lengths.sum() for lengths in works) / padded

    at_once, one_by_one = score(None), score(16)
    assert at_once[0] > 250_000
    assert one_by_one[0] < 17 * 2048  # a batch may be left of the mixture before
    assert one_by_one[1] < at_once[1] + 0.06


def test_a_work_shares_the_batches_of_a_mixture_that_has_room_for_it() -> None:
    waiting = WaitingRows[str]()
    waiting.add("first", [20] * 20, token_budget=100, mixed_batches=6)
    assert set(dict(waiting.take())) == {"first"}
    waiting.add("second", [30] * 2, token_budget=100, mixed_batches=6)
    waiting.add("third", [30] * 20, token_budget=100, mixed_batches=6)  # too much for this mixture
    assert set(dict(waiting.take())) == {"first", "second"}
    assert waiting.whole() == ["third"]
