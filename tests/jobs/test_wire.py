"""The wire format: whatever goes in comes out, and nothing else is let in."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import wire
from jobs.errors import WireError
from jobs.schema import FORMAT
from jobs.wire import decode_pairs, decode_scores, encode_pairs, encode_scores

TEXT = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
TYPES = st.sampled_from(
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)


@given(pairs=st.lists(st.tuples(TEXT, TEXT), max_size=40), kinds=st.tuples(TYPES, TYPES))
def test_pairs_come_back_as_they_were(
    pairs: Sequence[tuple[str | None, str | None]], kinds: tuple[pa.DataType, pa.DataType]
) -> None:
    columns = [
        pa.array([pair[side] for pair in pairs], pa.string()).cast(kind) for side, kind in enumerate(kinds)
    ]
    queries, passages = decode_pairs(encode_pairs(*columns))
    assert list(zip(queries, passages, strict=True)) == list(pairs)


@given(
    st.lists(
        st.one_of(st.floats(width=32, allow_nan=False), st.text(st.characters(exclude_categories=["Cs"])))
    )
)
def test_scores_and_errors_come_back_as_they_were(results: list[float | str]) -> None:
    scores = [None if isinstance(result, str) else result for result in results]
    errors = [result if isinstance(result, str) else None for result in results]
    back = decode_scores(encode_scores(pa.array(scores, pa.float32()), pa.array(errors, pa.string())))
    assert [column.to_pylist() for column in back] == [scores, errors]


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WireError):
        decode_pairs(noise)


def test_a_slice_of_a_chunked_column_travels_alone() -> None:
    column = pa.chunked_array([["a", "b"], ["c", None]])
    queries, _ = decode_pairs(encode_pairs(column.slice(1, 2), column.slice(2, 2)))
    assert queries == ["b", "c"]


def test_every_cut_of_a_payload_is_refused() -> None:
    payload = encode_pairs(pa.array(["query"] * 50), pa.array(["passage"] * 50))
    for end in range(0, len(payload), 7):
        with pytest.raises(WireError):
            decode_pairs(payload[:end])


def test_another_format_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FORMAT", 3)
    payload = encode_pairs(pa.array(["q"]), pa.array(["p"]))
    monkeypatch.undo()
    with pytest.raises(WireError, match="has format 3, this version of rankmill reads format 2"):
        decode_pairs(payload)


def test_a_pickle_is_refused_and_not_run(tmp_path: object) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("the pickle was run",))

    with pytest.raises(WireError):
        decode_pairs(pickle.dumps(Bomb()))


def test_other_columns_are_refused() -> None:
    scores = encode_scores(pa.array([1.0], pa.float32()), pa.array([None], pa.string()))
    with pytest.raises(WireError, match="columns"):
        decode_pairs(scores)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(WireError, match="must be text, not int64"):
        encode_pairs(pa.array([1]), pa.array(["p"]))


def test_texts_are_cut_before_they_travel() -> None:
    _, passages = decode_pairs(encode_pairs(pa.array(["q"]), pa.array(["ä" * (wire.MAX_TEXT_CHARS + 5)])))
    assert passages[0] == "ä" * wire.MAX_TEXT_CHARS


def test_limits_hold_before_anything_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode_pairs(pa.array(["q"] * 10), pa.array(["a" * 100_000] * 10))
    assert len(payload) < 10_000
    monkeypatch.setattr(wire, "MAX_CHUNK_BYTES", 100_000)
    monkeypatch.setattr(pa, "decompress", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(WireError, match="over the limit of 100,000"):
        decode_pairs(payload)


def test_a_bomb_that_lies_about_its_size_is_refused() -> None:
    packed = pa.compress(b"\0" * (200 << 20), codec="zstd", asbytes=True)
    assert len(packed) < 100_000
    for said in (1, 1000, wire.MAX_CHUNK_BYTES):
        with pytest.raises(WireError):
            decode_pairs(b"RKML" + FORMAT.to_bytes(4, "big") + said.to_bytes(8, "big") + packed)


def test_a_query_is_one_object_however_often_it_repeats() -> None:
    queries, _ = decode_pairs(encode_pairs(pa.array(["q" * 1000] * 500), pa.array(["p"] * 500)))
    assert len({id(query) for query in queries}) == 1
