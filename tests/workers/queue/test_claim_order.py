"""What a worker claims next and what it gives away: rules, tried in simulation."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill.jobs.contract.priority import new_run_id
from rankmill.jobs.system import system
from rankmill.workers.engine.pipeline import PriorityTurns
from rankmill.workers.queue.claim_order import ClaimOrder, chunks_to_give

Pairs = st.integers(1, 2000)


@given(st.lists(Pairs, min_size=1, max_size=6), st.lists(Pairs, min_size=1, max_size=6))
def test_bulk_work_keeps_a_quarter_beside_endless_requests(requests: list[int], chunks: list[int]) -> None:
    turns = PriorityTurns()
    had = {"request": 0, "bulk": 0}
    for request, bulk, _ in zip(cycle(requests), cycle(chunks), range(3000), strict=False):
        kind, pairs = ("bulk", bulk) if turns.bulk_is_next else ("request", request)
        had[kind] += pairs
        turns.took(kind, pairs)
    assert had["bulk"] >= (sum(had.values()) - 4 * 2000) / 5
    assert had["request"] > 0


@given(st.lists(Pairs, max_size=50), Pairs)
def test_a_request_comes_before_the_next_bulk_batch_whatever_was_before(
    bulk: list[int], request: int
) -> None:
    turns = PriorityTurns()
    for pairs in bulk:
        turns.took("bulk", pairs)
    assert not turns.bulk_is_next
    turns.took("request", request)
    turns.no_bulk_waits()
    assert not turns.bulk_is_next


def test_a_worker_claims_no_more_bulk_work_than_its_part() -> None:
    order = ClaimOrder(100_000)
    order.began(new_run_id("bulk"), "bulk", 1000)
    order.saw(2, workers=3)
    assert order.kinds(0, 1000, hungry=False) == ["request"]
    assert order.kinds(0, 600, hungry=False) == ["request", "bulk"]
    assert order.kinds(0, 1000, hungry=True) == ["request", "bulk"]  # the device comes first
    order.saw(64, workers=2)
    assert order.kinds(0, 31_000, hungry=False) == ["request", "bulk"]
    assert order.kinds(100_000, 100_000, hungry=False) == []
    order.saw(1, workers=1)  # nobody else is there to take a part
    assert order.kinds(0, 99_000, hungry=False) == ["request", "bulk"]


def test_a_run_that_a_worker_gives_back_comes_after_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(system, "monotonic", lambda: now[0])
    order = ClaimOrder(100)
    order.refused("aa")
    order.began("bb", "bulk", 10)
    assert (order.left_alone, order.refused_lately) == (["aa"], ["aa"])
    order.began("aa", "bulk", 10)  # it can score it now
    order.refused("bb")
    assert (order.left_alone, order.refused_lately) == (["bb"], ["bb"])
    now[0] = 1.5
    assert (order.left_alone, order.refused_lately) == ([], ["bb"])
    now[0] = 10.5
    assert (order.left_alone, order.refused_lately) == ([], [])


@given(
    st.lists(st.integers(1, 16), min_size=2, max_size=12),
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.integers(0, 11),
)
def test_chunks_that_one_worker_holds_are_given_on_and_never_to_and_fro(
    speeds: list[int], chunks: list[int], holder: int
) -> None:
    """Workers in steps; the first holds all chunks, idle ones are given some."""
    held: list[list[int]] = [[] for _ in speeds]
    held[holder % len(speeds)] = chunks[:]
    moves = steps = 0
    total = sum(chunks)
    while any(held):
        steps += 1
        for number, mine in enumerate(held):
            idle = [other for other in held if not other]
            unstarted = mine[1:]
            for other, _ in zip(idle, range(chunks_to_give(unstarted, sum(mine), len(idle))), strict=False):
                other.append(mine.pop())
                moves += 1
            left = speeds[number]
            while mine and left:
                done = min(left, mine[0])
                mine[0] -= done
                left -= done
                if not mine[0]:
                    mine.pop(0)
    assert moves <= len(chunks) + len(speeds)
    # all worked until little was left: no more than the largest chunk, and a quarter, on the slowest
    assert steps <= total / sum(speeds) + 1.25 * max(chunks) / min(speeds) + 2


def test_a_lone_worker_mixes_its_work_to_the_end() -> None:
    """Nobody may come for its claimed chunks, so they are not cut one by one."""
    order = ClaimOrder(100)
    order.saw(0, workers=1)
    assert not order.last
    order.saw(1, workers=2)
    assert order.last
    order.saw(2, workers=2)
    assert not order.last
