"""The wire format: whatever goes in comes out, and nothing else is let in."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract import wire
from rankmill.jobs.contract.errors import FormatError, WireError
from rankmill.jobs.contract.schema import FORMAT, MAX_CHUNK_ROWS, Inputs
from rankmill.jobs.contract.wire import decode_rows, decode_scores, encode_rows, encode_scores, outputs

TEXT = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
TYPES = st.sampled_from(
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)


decode_pairs = partial(decode_rows, inputs="pairs")


def encode_pairs(*columns: pa.Array) -> bytes:
    return encode_rows(columns, "pairs")


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
        st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.text(st.characters(exclude_categories=["Cs"])),
        )
    ),
    st.sampled_from([None, pa.int32(), pa.string()]),
)
def test_scores_and_errors_come_back_as_they_were(results: list[float | str], counted: Any) -> None:
    scores = [None if isinstance(result, str) else result for result in results]
    errors = [result if isinstance(result, str) else None for result in results]
    tokens: Any = None
    if counted:
        said = range(len(scores)) if counted == pa.int32() else map(str, range(len(scores)))
        tokens = [None if score is None else each for score, each in zip(scores, said, strict=True)]
    column = None if tokens is None else pa.array(tokens, counted)
    payload = encode_scores(pa.array(scores, pa.float32()), pa.array(errors, pa.string()), column)
    back = [None if column is None else column.to_pylist() for column in decode_scores(payload)]
    assert back == [scores, errors, tokens]


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(WireError):
        decode_pairs(noise)


@given(texts=st.lists(TEXT, max_size=30), inputs=st.sampled_from(["texts", "conversations", "tokens"]))
def test_single_texts_come_back(texts: list[str | None], inputs: Inputs) -> None:
    payload = encode_rows([pa.array(texts, pa.string())], inputs)
    assert decode_rows(payload, inputs) == (texts,)


def test_texts_pairs_and_conversations_are_not_taken_for_each_other() -> None:
    pairs, texts = encode_pairs(pa.array(["q"]), pa.array(["p"])), encode_rows([pa.array(["t"])], "texts")
    with pytest.raises(WireError, match="columns"):
        decode_pairs(texts)
    with pytest.raises(WireError, match="not an Arrow stream of one batch"):
        decode_rows(pairs, "texts")
    with pytest.raises(WireError, match="columns"):
        decode_rows(texts, "conversations")


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
    with pytest.raises(FormatError, match="a payload has format 3, this release reads 1: run the same"):
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


def test_of_texts_that_are_too_long_workers_see_that_they_are() -> None:
    texts = ["ä" * (wire.MAX_TEXT_CHARS + more) for more in (0, 1, 5)]
    _, passages = decode_pairs(encode_pairs(pa.array(["q"] * 3), pa.array(texts)))
    assert passages == [texts[0], texts[1], texts[1]]


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


@pytest.mark.parametrize("column", [0, 1])
def test_a_long_text_in_a_dictionary_travels_while_its_rows_fit(column: int) -> None:
    rows = wire.MAX_CHUNK_BYTES // wire.MAX_TEXT_CHARS
    long_text = pa.array(["unused" * 1000, "x" * (wire.MAX_TEXT_CHARS + 2)])
    texts = pa.DictionaryArray.from_arrays(pa.array([1] * (rows + 1), pa.int8()), long_text)
    columns = [pa.array(["y"] * len(texts)), pa.array(["y"] * len(texts))]
    columns[column] = pa.chunked_array([texts.slice(0, 2), texts.slice(2)])
    fitting = [each.slice(0, rows - 1) for each in columns]
    assert set(decode_pairs(encode_pairs(*fitting))[column]) == {"x" * (wire.MAX_TEXT_CHARS + 1)}
    allocated = pa.total_allocated_bytes()
    with pytest.raises(WireError, match="bytes of text is over the limit of 67,108,864"):
        encode_pairs(*columns)
    many = pa.DictionaryArray.from_arrays(pa.array([1] * 5000, pa.int16()), long_text)
    columns = [pa.array(["y"] * len(many))] * 2
    columns[column] = many
    with pytest.raises(WireError, match=r"20,971,.* bytes of text is over the limit of 67,108,864"):
        encode_pairs(*columns)  # which would be 5 GB
    assert pa.total_allocated_bytes() - allocated < 1 << 20


def packed(raw: bytes | pa.Buffer) -> bytes:
    """An Arrow stream as a payload, whatever is in it."""
    size = len(raw).to_bytes(8, "big")
    return b"RKML" + FORMAT.to_bytes(4, "big") + size + bytes(pa.compress(raw, codec="zstd", asbytes=True))


def unpacked(payload: bytes) -> bytes:
    """The Arrow stream of a payload."""
    size = int.from_bytes(payload[8:16], "big")
    return bytes(pa.decompress(payload[16:], decompressed_size=size, codec="zstd", asbytes=True))


def stream(*batches: pa.RecordBatch, **options: Any) -> bytes:
    """What would be as large as its batches, if somebody unpacked it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return packed(sink.getvalue())


def pairs(queries: list[str | None], passages: list[str | None]) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(queries).cast(wire._TEXT), pa.array(passages, pa.string())], schema=wire._ROWS["pairs"]
    )


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small payloads that some way of reading makes large."""
    large = pa.array(["a" * (300 << 20)])
    large_query = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), large)
    one = pairs(["q"], ["p"])
    for codec in ("zstd", "lz4"):
        batch = pa.record_batch([one["query"], large], schema=wire._ROWS["pairs"])
        yield f"body in {codec}", stream(batch, compression=codec)
        batch = pa.record_batch([large_query, one["passage"]], schema=wire._ROWS["pairs"])
        yield f"dictionary in {codec}", stream(batch, compression=codec)
        batch = pa.record_batch([pa.nulls(1, pa.float32()), large], schema=wire._SCORES)
        yield f"errors in {codec}", stream(batch, compression=codec)
    yield "batches", stream(*[one] * 1000)
    yield "dictionaries", stream(*(pairs([f"q{number}"], ["p"]) for number in range(100)))
    grows = [pairs([f"q{number}" for number in range(end)], ["p"] * end) for end in range(1, 50)]
    yield "dictionary in pieces", stream(*grows, emit_dictionary_deltas=True)
    rows = MAX_CHUNK_ROWS + 1
    yield "rows", stream(pairs(["q"] * rows, [None] * rows))
    nothing = [pa.nulls(rows, kind) for kind in wire._SCORES.types]
    yield "rows of scores", stream(pa.record_batch(nothing, schema=wire._SCORES))
    many = pa.schema([(f"column {number}", pa.string()) for number in range(100_000)])
    yield "columns", stream(pa.record_batch([pa.nulls(0, pa.string())] * len(many), schema=many))
    everywhere = pa.array(np.zeros(MAX_CHUNK_ROWS, np.int32))
    long_query = pa.DictionaryArray.from_arrays(everywhere, pa.array(["q" * (1 << 20)]))
    batch = pa.record_batch([long_query, pa.nulls(len(long_query), pa.string())], schema=wire._ROWS["pairs"])
    yield "a query that repeats", stream(batch)
    yield "metadata", stream(one.replace_schema_metadata({"note": "n" * (50 << 20)}))


def test_small_payloads_stay_small(tmp_path: Path) -> None:
    files = []
    for name, payload in bombs():
        assert len(payload) < 5 << 20, name
        file = tmp_path / name
        file.write_bytes(payload)
        files.append(file)
    code = """
import resource, sys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.wire import decode_rows, decode_scores
for file in sys.argv[1:]:
    payload = open(file, "rb").read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for decode in (lambda payload: decode_rows(payload, "pairs")), decode_scores:
        try:
            decode(payload)
            print(file, "was read")
        except WireError:
            pass
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > 150 << 10:
        print(file, "took", grown >> 10, "MiB")
"""
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_the_largest_payload_takes_no_more_than_its_texts() -> None:
    rows = MAX_CHUNK_ROWS
    query = "q" * (wire.MAX_CHUNK_BYTES // rows)
    queries = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([query]))
    payload = stream(pa.record_batch([queries, pa.nulls(rows, pa.string())], schema=wire._ROWS["pairs"]))
    assert len(payload) < 10_000
    tracemalloc.start()
    found, passages = decode_pairs(payload)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == len(passages) == rows
    assert most < 100 << 20  # two lists, and the numbers of one


PLAIN = [
    unpacked(encode_pairs(pa.array(["q", "q", None, "other"]), pa.array(["a", None, "b", "cä"]))),
    unpacked(encode_scores(pa.array([1.5, None], pa.float32()), pa.array([None, "bad"]))),
]
BYTES = st.sampled_from([b"\0", b"\1", b"\x7f", b"\xff", b"\x80"]) | st.binary(max_size=4)
CHANGES = st.lists(st.tuples(st.integers(0, 2000), BYTES), max_size=4)


@settings(max_examples=500)
@given(st.sampled_from(PLAIN), CHANGES, st.sampled_from([0, 0, 0, -8, -1, 8]))
def test_a_damaged_stream_is_refused_or_still_of_pairs_or_scores(
    raw: bytes, changes: list[tuple[int, bytes]], longer: int
) -> None:
    changed = bytearray(raw[:longer] if longer < 0 else raw + b"\0" * longer)
    for where, new in changes:
        place = where % len(changed)
        changed[place : place + len(new)] = new[: len(changed) - place]
    with suppress(WireError):
        queries, passages = decode_pairs(packed(bytes(changed)))
        assert len(queries) == len(passages) <= MAX_CHUNK_ROWS
        assert all(text is None or isinstance(text, str) for text in (*queries, *passages))
    with suppress(WireError):
        scores, errors, _ = decode_scores(packed(bytes(changed)))
        assert len(scores) == len(errors) <= MAX_CHUNK_ROWS
        rows = zip(scores.to_pylist(), errors.to_pylist(), strict=True)
        assert all((score is None) != (error is None) for score, error in rows)


def test_lists_of_scores_come_back_and_damaged_ones_do_not() -> None:
    numbers = pa.array(np.arange(6, dtype=np.float32))
    lists = pa.FixedSizeListArray.from_arrays(numbers, 2, mask=pa.array([False, True, False]))
    errors = pa.array([None, "why", None], pa.string())
    for counted in (None, pa.array([4, None, 5], pa.int32())):
        scores, reasons, tokens = decode_scores(encode_scores(lists, errors, counted))
        assert (scores, reasons, tokens) == (lists, errors, counted)
    assert outputs(lists) == 2
    for bad in (np.nan, np.inf, None):
        few = pa.array([1.0, bad, 3.0, 4.0], pa.float32())
        payload = encode_scores(pa.FixedSizeListArray.from_arrays(few, 2), pa.nulls(2, pa.string()))
        with pytest.raises(WireError, match="not a finite number"):
            decode_scores(payload)
    double = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0]), 2)
    with pytest.raises(WireError, match="has columns"):
        decode_scores(encode_scores(double, pa.nulls(1, pa.string())))
    with pytest.raises(WireError, match="a negative number of tokens"):
        decode_scores(encode_scores(lists, errors, pa.array([4, None, -1], pa.int32())))


def test_pyarrow_imports_pandas_only_for_what_needs_it() -> None:
    code = """
import sys
from rankmill.jobs.contract.arrow import leave_out_pandas
leave_out_pandas()
import numpy as np, pyarrow as pa
table = pa.table({"score": np.zeros(2), "text": ["a", None]})
assert "pandas" not in sys.modules
assert table.to_pandas()["text"].isna().tolist() == [False, True]
import pandas
assert pa.table({"score": pandas.Series([0.0, 0.0]), "text": ["a", None]}) == table
"""
    subprocess.run([sys.executable, "-c", code], check=True)
