"""What rows begin with in common is computed once, and the scores are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.torch.prefixes import find_shared_prefixes
from rankmill.workers.batches.planner import plan_batches
from rankmill.workers.batches.tokens import Batch, in_a_row, put_together, sharing
from rankmill.workers.engine.engine import Engine
from rankmill.workers.models.loading import load_model
from tests.harness.models.rerankers import DECODERS, PAIR_TEMPLATE, make_decoder

pytestmark = pytest.mark.own_precision

ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=6)), min_size=1, max_size=8
)
BEGINNINGS = {0: [1, 2, 3, 1, 2, 3, 1, 2], 1: [1, 2, 3, 3, 3], 2: []}


@given(ROWS, st.sampled_from([None, 0, 3]))
def test_a_beginning_and_the_rest_are_the_row(
    drawn: list[tuple[int, list[int]]], skipped: int | None
) -> None:
    rows = [BEGINNINGS[group] + rest for group, rest in drawn]
    tokens = sharing(in_a_row(rows), [str(group) for group, _ in drawn])
    batch = put_together([(tokens, np.arange(len(rows)))], 9)
    found = find_shared_prefixes(batch, skipped)
    if found is None:
        return
    assert found.ids.size + found.rest.size < batch.ids.size
    for number, row in enumerate(rows):
        group = found.of[number]
        shared = int(found.mask[group].sum())
        rest = found.rest[number][found.rest_mask[number] == 1].tolist()
        assert found.ids[group][:shared].tolist() + rest == row
        assert found.places[number][: len(rest)].tolist() == list(range(shared, len(row)))
        read = [place for place, token in enumerate(row) if token != skipped]
        assert not read or read[-1] >= shared


def test_rows_of_one_query_are_found() -> None:
    rows = [BEGINNINGS[group] + [4, row] for group in (0, 1) for row in range(6)]
    batch = put_together([(sharing(in_a_row(rows), [str(row // 6) for row in range(12)]), np.arange(12))], 9)
    found = find_shared_prefixes(batch, None)
    assert found is not None
    assert found.mask.sum(axis=1).tolist() in ([9, 6], [6, 9])
    assert find_shared_prefixes(Batch.padded(batch.ids, None, batch.mask), None) is None


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), max_size=60), st.integers(1, 200))
def test_rows_of_a_group_stay_together(rows: list[tuple[int, int]], budget: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    batches = plan_batches(lengths, budget, groups=groups)
    order = [row for batch in batches for row in batch.tolist()]
    assert sorted(order) == list(range(len(rows)))
    assert [groups[row] for row in order] == sorted(groups)
    for batch in batches:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= budget


@pytest.mark.parametrize("task", ["causal", "classifier"])
@pytest.mark.parametrize("kind", DECODERS)
def test_scores_are_those_of_whole_rows(
    kind: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_families` holds whole rows to the scores of sentence-transformers."""
    model = make_decoder(tmp_path, kind, task=task, template=PAIR_TEMPLATE)
    spec = ScoreSpec(model=str(model), precision="fp32", activation="identity", instruction="moon " * 20)
    loaded = load_model(spec, "cpu", "torch", str(tmp_path / "cache"))
    queries = ["what is it"] * 20 + ["so far away"] * 5 + [f"other {row}" for row in range(5)]
    passages = [f"a moon {'and tea ' * (row % 7)}{row}" for row in range(30)]
    calls: list[int] = []
    backend: Any = loaded.backend
    if backend.shares_prefixes:
        whole = backend.network.continued

        def watched(*arrays: Any) -> Any:
            calls.append(len(arrays[2]))
            return whole(*arrays)

        monkeypatch.setattr(backend.network, "continued", watched)
    assert backend.shares_prefixes == (kind in {"qwen3", "qwen2", "llama", "gemma"})
    shared = Engine(loaded, 400).score(queries, passages)
    assert (sum(calls) >= 20) == backend.shares_prefixes
    monkeypatch.setattr(backend, "shares_prefixes", False)
    alone = Engine(loaded, 400).score(queries, passages)
    assert shared.errors == alone.errors == {}
    assert alone.scores.std() > 0.05
    np.testing.assert_allclose(shared.scores, alone.scores, atol=1e-4)
