"""The data plane: pairs and scores as Arrow IPC streams.

A payload is one record batch in an IPC stream, compressed with zstd, whose schema metadata
carries the format version. Pairs: ``query`` (dictionary-encoded, as queries repeat) and
``passage``, both nullable text. Scores: ``score`` (float32) and ``error`` (text); in each row
exactly one of them is null.

>>> import pyarrow as pa
>>> decode_pairs(encode_pairs(pa.array(["q", "q"]), pa.array(["a", None])))[1].to_pylist()
['a', None]
"""

from __future__ import annotations

from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import WireError

FORMAT = 1
"""Version written into every payload; a reader refuses any other."""

MAX_TEXT_CHARS = 1 << 20
"""Texts are cut here (characters) before they travel. No model reads that far: even at 8,192
tokens it leaves 128 characters for each."""

MAX_CHUNK_BYTES = 64 << 20
"""Largest payload a reader accepts, before and after decompression (bytes)."""

MAX_CHUNK_ROWS = 1 << 20

_TEXT = pa.dictionary(pa.int32(), pa.string())
_PAIRS = pa.schema([("query", _TEXT), ("passage", pa.string())])
_SCORES = pa.schema([("score", pa.float32()), ("error", pa.string())])
_VERSION_KEY = b"rankmill.format"


def encode_pairs(queries: pa.Array, passages: pa.Array) -> bytes:
    """Encode two text arrays of shape ``[n]`` as a chunk payload.

    Accepts string, large_string, string_view and dictionary arrays, chunked or not; nulls stay.

    Raises
    ------
    WireError
        The arrays are not text, differ in length, or the payload would be over ``MAX_CHUNK_BYTES``.
    """
    if len(queries) != len(passages):
        raise WireError(f"{len(queries)} queries but {len(passages)} passages in one chunk")
    query = pc.dictionary_encode(_clip(queries))
    batch = pa.record_batch([_combined(query).cast(_TEXT), _combined(_clip(passages))], schema=_PAIRS)
    if batch.nbytes > MAX_CHUNK_BYTES:
        raise WireError(f"a chunk of {batch.nbytes:,} bytes is over the limit of {MAX_CHUNK_BYTES:,}")
    return _write(batch)


def decode_pairs(payload: bytes) -> tuple[pa.Array, pa.Array]:
    """Decode and validate a chunk payload into ``(queries, passages)``, string arrays of ``[n]``.

    Raises
    ------
    WireError
        Another format version, not the columns above, damaged, or over the limits.
    """
    batch = _read(payload, _PAIRS)
    return batch["query"].dictionary_decode(), batch["passage"]


def encode_scores(scores: pa.Array, errors: pa.Array) -> bytes:
    """Encode float32 scores and text errors, both of shape ``[n]``."""
    return _write(pa.record_batch([scores, errors], schema=_SCORES))


def decode_scores(payload: bytes) -> tuple[pa.Array, pa.Array]:
    """Decode and validate ``(scores, errors)``; raises `WireError` as `decode_pairs` does."""
    batch = _read(payload, _SCORES)
    return batch["score"], batch["error"]


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold queries or passages; a column of nulls can."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)


def _combined(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _clip(texts: pa.Array) -> pa.Array:
    if not is_text(texts.type):
        raise WireError(f"queries and passages must be text, not {texts.type}")
    if pa.types.is_dictionary(texts.type):
        texts = texts.cast(texts.type.value_type)
    if pa.types.is_string_view(texts.type) or pa.types.is_null(texts.type):
        texts = texts.cast(pa.string())
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    clipped = pc.utf8_slice_codeunits(texts, 0, MAX_TEXT_CHARS) if longest > MAX_TEXT_CHARS else texts
    return clipped.cast(pa.string())


def _write(batch: pa.RecordBatch) -> bytes:
    schema = batch.schema.with_metadata({_VERSION_KEY: str(FORMAT).encode()})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return cast(bytes, sink.getvalue().to_pybytes())


def _read(payload: bytes, schema: pa.Schema) -> pa.RecordBatch:
    if len(payload) > MAX_CHUNK_BYTES:
        raise WireError(f"a payload of {len(payload):,} bytes is over the limit of {MAX_CHUNK_BYTES:,}")
    try:
        with pa.ipc.open_stream(payload) as reader:
            _check_schema(reader.schema, schema)
            batch = reader.read_next_batch()
            if batch.num_rows > MAX_CHUNK_ROWS or batch.nbytes > MAX_CHUNK_BYTES:
                raise WireError(
                    f"a chunk of {batch.num_rows:,} rows, {batch.nbytes:,} bytes is over the limits"
                )
            batch.validate(full=True)
    except (pa.ArrowException, StopIteration, OSError) as error:
        raise WireError(f"a payload is damaged or not Arrow: {error}") from error
    return batch


def _check_schema(found: pa.Schema, expected: pa.Schema) -> None:
    version = (found.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise WireError("a payload carries no rankmill format version")
    if version != str(FORMAT).encode():
        raise WireError(
            f"a payload has format {version.decode(errors='replace')}, this version of rankmill reads "
            f"format {FORMAT}: run the same rankmill release on producers and workers"
        )
    if not found.equals(expected):
        raise WireError(f"a payload has columns {found.names} of types {found.types}, not {expected.names}")
