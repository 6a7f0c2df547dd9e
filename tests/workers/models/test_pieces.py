"""A batch is cut into pieces for the streams of a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.batches.tokens import Batch, Ids, cut_batch
from rankmill.workers.models.loading import load_model


def batch_of(lengths: list[int]) -> Batch:
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    return Batch.padded(mask * (1 + np.arange(len(lengths)))[:, None], None, mask)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), st.integers(1, 8))
def test_every_token_is_in_exactly_one_piece(lengths: list[int], most: int) -> None:
    batch = batch_of(lengths)
    pieces = cut_batch(batch, most)
    assert 1 <= len(pieces) <= most
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(lengths)))
    for rows, piece in pieces:
        width = piece.ids.shape[1]
        assert len(pieces) == 1 or width == max(lengths[row] for row in rows)
        np.testing.assert_array_equal(piece.ids, batch.ids[rows, :width])
        np.testing.assert_array_equal(piece.mask, batch.mask[rows, :width])


@given(st.lists(st.integers(20, 120), min_size=40, max_size=60), st.integers(2, 4))
def test_all_streams_have_about_as_much_to_do(lengths: list[int], streams: int) -> None:
    pieces = cut_batch(batch_of(lengths), streams)
    assert len(pieces) <= streams
    assert max(piece.ids.size for _, piece in pieces) <= -(-len(lengths) // streams) * max(lengths)


def test_a_long_row_widens_no_others() -> None:
    pieces = cut_batch(batch_of([20] * 16 + [300]), 2)
    assert [piece.ids.shape for _, piece in pieces] == [(1, 300), (16, 20)]


def test_a_small_batch_is_one_piece() -> None:
    assert len(cut_batch(batch_of([100, 90, 60]), 4)) == 1


def test_a_lone_batch_uses_all_streams(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave all cores but those of one stream idle."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    backend = load_model(ScoreSpec(model=str(tiny_model), precision="fp32"), "cpu", "openvino").backend
    lengths = [7, 60, 3, 31, *[12] * 60]
    batch = batch_of(lengths)
    whole = Batch.padded(np.minimum(batch.ids, 9), np.zeros_like(batch.ids), batch.mask)
    started: list[int] = []
    request = type(backend._compiled.create_infer_request())  # type: ignore[attr-defined]
    begin = request.start_async

    def start(self: object, inputs: list[Ids]) -> None:
        started.append(len(inputs[0]))
        begin(self, inputs)

    monkeypatch.setattr(request, "start_async", start)
    together = backend.submit(whole).result()
    assert len(started) == 2
    assert sum(started) == len(lengths)
    alone = [
        backend.submit(
            Batch.padded(
                whole.ids[[row], :long], np.zeros((1, long), dtype=np.int64), whole.mask[[row], :long]
            )
        ).result()[0]
        for row, long in enumerate(lengths)
    ]
    np.testing.assert_allclose(together, alone, atol=1e-5)
