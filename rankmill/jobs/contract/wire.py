"""The wire format, which is Arrow, of rows to score (pairs and others) and of scores.

A payload is a header (magic, format version, size before compression) and an Arrow IPC stream of one record
batch. The stream is compressed with zstd. The header is not compressed, so that a reader knows version and
size before it decompresses the stream. Pairs have the columns ``query`` (dictionary-encoded, because queries
repeat) and ``passage``, both nullable text. Single texts have the column ``text``, conversations ``messages``
(JSON), and requests for tokens ``asked`` (JSON). Scores have ``score`` (float32, or a list of them) and
``error`` (text); in each row exactly one is null. If the job asks for tokens, the column ``tokens`` has for
each row the number of tokens (int32) or the tokens themselves (JSON); null means unknown.

>>> import pyarrow as pa
>>> decode_rows(encode_rows([pa.array(["q", "q"]), pa.array(["a", None])], "pairs"), "pairs")
(['q', 'q'], ['a', None])
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import RowFault, WireError
from rankmill.jobs.contract.schema import FORMAT, MAX_CHUNK_ROWS, Inputs, check_format

MAX_TEXT_CHARS = 1 << 22
"""A text of a row has at most this many characters. A row with a longer text is refused, not cut, because
only the tokenizer knows where tokens end. Tokenizing a text of this length takes 10 to 30 s and 0.6 to 2.4
GB.
"""

MAX_CHUNK_BYTES = 64 << 20
"""A payload has at most this many bytes, compressed and decompressed. All texts of a chunk together also have
at most this many bytes, and a repeated query counts in every row.
"""

_TEXT = pa.dictionary(pa.int32(), pa.string())
_ROWS: Mapping[Inputs, pa.Schema] = {
    "pairs": pa.schema([("query", _TEXT), ("passage", pa.string())]),
    "texts": pa.schema([("text", pa.string())]),
    "conversations": pa.schema([("messages", pa.string())]),
    "tokens": pa.schema([("asked", pa.string())]),
}
_SCORES = pa.schema([("score", pa.float32()), ("error", pa.string())])
_SCORES_AND_TOKENS = _SCORES.append(pa.field("tokens", pa.int32()))
_HEADER = struct.Struct(">4sIQ")
_LEVEL = -5
"""A zstd level that is faster than level 1 but compresses less, because payloads live only for seconds."""
_OPTIONS = pa.ipc.IpcWriteOptions()
"""Options for writing a stream. Without options, pyarrow lets environment variables change the format."""
_MAGIC = b"RKML"

_MAX_METADATA = 64 << 10
"""A message of an Arrow stream is refused if it has more than this many bytes of metadata; rankmill's
messages have about 200.
"""

_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3


def encode_rows(columns: Sequence[pa.Array], inputs: Inputs) -> bytes:
    """Encode rows, given as text arrays ``[n]``. Pairs have two arrays, queries and passages; other rows have
    one.

    Accepts string, large_string, string_view and dictionary arrays, chunked or not, with nulls.

    Raises
    ------
    WireError
        The arrays are not text or differ in length, or the payload or its text is larger than
        ``MAX_CHUNK_BYTES``.
    """
    if len(columns[0]) != len(columns[-1]):
        raise WireError(f"{len(columns[0])} queries but {len(columns[-1])} passages in one chunk")
    *queries, texts = columns
    encoded = [*map(_encode_queries, queries), _encode_passages(texts)]
    _check_text(*encoded)
    encoded[-1] = _combined(encoded[-1].cast(pa.string()))
    return _write(pa.record_batch(encoded, schema=_ROWS[inputs]))


def decode_rows(payload: bytes, inputs: Inputs) -> tuple[list[str | None], ...]:
    """Decode and validate a payload of `encode_rows` into lists ``[n]``, one for each column.

    Equal queries share one Python object.

    Raises
    ------
    WireError
        The payload has another format version or other columns, is damaged, or exceeds a limit.
    """
    batch = _read(payload, _ROWS[inputs])
    _check_text(*batch.columns)
    *queries, texts = batch.columns
    return (*map(_decode_queries, queries), texts.to_pylist())


def _decode_queries(column: pa.DictionaryArray) -> list[str | None]:
    queries = column.dictionary.to_pylist()
    return [None if place is None else queries[place] for place in column.indices.to_pylist()]


def encode_scores(scores: pa.Array, errors: pa.Array, tokens: pa.Array | None = None) -> bytes:
    """Encode float32 scores (or lists of equal length) and text errors, both of shape ``[n]``.

    If the job asks for tokens, `tokens` has for each row their number (int32), or the tokens as JSON (text).
    Raises `WireError` if the payload is larger than ``MAX_CHUNK_BYTES``.
    """
    columns, schema = [scores, errors], _with_type(_SCORES, "score", scores.type)
    if tokens is not None:
        columns, schema = [*columns, tokens], schema.append(pa.field("tokens", tokens.type))
    return _write(pa.record_batch(columns, schema=schema))


def outputs(scores: pa.Array) -> int:
    """Return the number of labels if each row has a score for each label, or 0 if each row has one score."""
    return int(scores.type.list_size) if pa.types.is_fixed_size_list(scores.type) else 0


def decode_scores(payload: bytes) -> tuple[pa.Array, pa.Array, pa.Array | None]:
    """Decode and validate ``(scores, errors, tokens)``; tokens are ``None`` if the payload lacks them.

    Raises
    ------
    WireError
        The payload has another format version or other columns, is damaged, or exceeds a limit. Or in a row,
        both score and error are null, or neither is; or the score is not a finite number, or the number of
        tokens is negative.
    """
    batch = _read(payload, _SCORES, _SCORES_AND_TOKENS)
    scores, errors, *counted = batch.columns
    all_have_one = not scores.null_count and errors.null_count == len(errors)
    if not all_have_one and not pc.all(pc.xor(pc.is_valid(scores), pc.is_valid(errors)), min_count=0).as_py():
        raise WireError("a row has both a score and an error, or neither")
    numbers = scores.drop_null().flatten() if outputs(scores) else scores.drop_null()
    if numbers.null_count or not np.isfinite(numbers.to_numpy()).all():
        raise WireError("a score is not a finite number")
    tokens = counted[0] if counted else None
    if tokens is not None and pa.types.is_int32(tokens.type) and (pc.min(tokens).as_py() or 0) < 0:
        raise WireError("a row has a negative number of tokens")
    return scores, errors, tokens


def is_pair(item: object) -> bool:
    """Return whether an item is a pair: a query and a passage, either of which may be null."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    return all(text is None or isinstance(text, str) for text in item)


NOT_TEXT = "a content is text, or a list of {type: text, text}"
"""Error message if a content in a conversation is neither text nor a list of texts."""


def content_texts(parts: Sequence[object]) -> list[str] | None:
    """Return the texts of a message's content that is a list, such as ``[{"type": "text", "text": "Hi"}]``.

    Return ``None`` if the list has any other part, such as an image. A part without a type counts as text.
    """
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)
    ]
    return texts if len(texts) == len(parts) else None


def mended(text: str | None) -> str | None:
    """Replace unpaired surrogates, which UTF-8 cannot encode, with U+FFFD."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_fault(texts: Mapping[str, str | None]) -> tuple[RowFault, str] | None:
    """Return the kind and the message of the first error that a row has before tokenizing, or ``None``.

    `texts` has the row's texts by name, such as ``query``. An error is a text that is null or too long.
    """
    for name, text in texts.items():
        if text is None:
            return "null", f"{name} is null"
    for name, text in texts.items():
        if text is not None and len(text) > MAX_TEXT_CHARS:
            return "too_long", f"the {name} is too long, {MAX_TEXT_CHARS:,} characters are taken: shorten it"
    return None


def names_of_texts(inputs: Inputs) -> tuple[str, ...]:
    """The names of a row's texts, as errors show them."""
    return ("query", "passage") if inputs == "pairs" else (inputs.removesuffix("s"),)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this Arrow type can contain texts. Arrow's null type can, too."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)


def text_bytes(texts: pa.Array | pa.ChunkedArray) -> int:
    """Return the bytes of text in all rows. A text counts in every row, even if a dictionary stores it once.

    Raises
    ------
    WireError
        The column is not text.
    """
    parts = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
    return sum(pc.sum(_lengths(part)).as_py() or 0 for part in parts)


def _lengths(texts: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(texts.type):
        return _lengths(texts.dictionary).take(texts.indices)
    return pc.binary_length(_simple(texts))


def _check_text(*columns: pa.Array) -> None:
    """Raise `WireError` if the texts of a chunk are too large; a repeated text counts in every row."""
    size = sum(map(text_bytes, columns))
    if size > MAX_CHUNK_BYTES:
        raise WireError(f"a chunk of {size:,} bytes of text is over the limit of {MAX_CHUNK_BYTES:,}")


def _combined(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _encode_queries(texts: pa.Array | pa.ChunkedArray) -> pa.DictionaryArray:
    if not pa.types.is_dictionary(texts.type):
        return _combined(pc.dictionary_encode(_clip(texts))).cast(_TEXT)
    words, places, offset = [_clip(pa.array([], pa.string()))], [pa.array([], pa.int32())], 0
    for part in texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]:
        used = pc.unique(part.indices).drop_null()
        words.append(_clip(_simple(part.dictionary).take(used)))
        places.append(pc.add(pc.index_in(part.indices, value_set=used), pa.scalar(offset, pa.int32())))
        offset += len(used)
    encoded = pc.dictionary_encode(pa.concat_arrays(words))
    return pa.DictionaryArray.from_arrays(encoded.indices.take(pa.concat_arrays(places)), encoded.dictionary)


def _encode_passages(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Encode passages. A dictionary array stays a dictionary array, because it may be too large when each
    repeated text is written out.
    """
    return _encode_queries(texts) if pa.types.is_dictionary(texts.type) else _combined(_clip(texts))


def _simple(texts: pa.Array) -> pa.Array:
    """Cast texts to a type that Arrow's functions accept."""
    if not is_text(texts.type):
        raise WireError(f"queries and passages must be text, not {texts.type}")
    if pa.types.is_string_view(texts.type) or pa.types.is_null(texts.type):
        return texts.cast(pa.large_string())
    return texts


def _clip(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Cut texts that are too long to one character more than allowed, so that workers see which ones are too
    long.

    Raise `WireError` if the texts together exceed a chunk's limit.
    """
    texts = _simple(texts)
    if text_bytes(texts) > MAX_TEXT_CHARS:  # with fewer bytes in all, no text can be too long
        longest = pc.max(pc.binary_length(texts)).as_py()
        texts = pc.utf8_slice_codeunits(texts, 0, MAX_TEXT_CHARS + 1) if longest > MAX_TEXT_CHARS else texts
        _check_text(texts)
    return texts.cast(pa.string())


def _write(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    raw = sink.getvalue()
    if raw.size > MAX_CHUNK_BYTES:
        raise WireError(f"a chunk of {raw.size:,} bytes is over the limit of {MAX_CHUNK_BYTES:,}")
    packed = pa.Codec("zstd", compression_level=_LEVEL).compress(raw, asbytes=True)
    return b"".join((_HEADER.pack(_MAGIC, FORMAT, raw.size), packed))


def _read(payload: bytes, *schemas: pa.Schema) -> pa.RecordBatch:
    """Read the record batch of a payload, which must have one of `schemas`.

    All `schemas` must have the same number of dictionaries.
    """
    size = _unpacked_size(payload)
    try:
        raw = pa.decompress(memoryview(payload)[_HEADER.size :], decompressed_size=size, codec="zstd")
        _check_messages(memoryview(raw).cast("B"), sum(map(pa.types.is_dictionary, schemas[0].types)))
        with pa.ipc.open_stream(raw) as reader:
            _check_schema(reader.schema, schemas)
            batch = reader.read_next_batch()
            batch.validate(full=True)
    except (pa.ArrowException, StopIteration, OSError, ValueError, struct.error) as error:
        raise WireError(f"a payload is damaged or not Arrow: {error}") from error
    return batch


def _unpacked_size(payload: bytes) -> int:
    """Check a payload's header and sizes, and return its size in bytes after decompression."""
    if len(payload) < _HEADER.size or not payload.startswith(_MAGIC):
        raise WireError("a payload does not have rankmill's header")
    _, version, size = _HEADER.unpack_from(payload)
    check_format(version, "a payload")
    largest = max(len(payload), size)
    if largest > MAX_CHUNK_BYTES:
        raise WireError(f"a payload of {largest:,} bytes is over the limit of {MAX_CHUNK_BYTES:,}")
    return int(size)


def _with_type(schema: pa.Schema, name: str, kind: pa.DataType) -> pa.Schema:
    return schema.set(schema.names.index(name), pa.field(name, kind))


def _check_schema(given: pa.Schema, schemas: Sequence[pa.Schema]) -> None:
    if any(map(given.equals, schemas)):
        return
    expected = next((schema for schema in schemas if schema.names == given.names), schemas[0])
    if given.names == expected.names and "score" in given.names:
        if several := outputs(given.empty_table()[0]):
            expected = _with_type(expected, "score", pa.list_(pa.float32(), several))
        if "tokens" in given.names and pa.types.is_string(given.field("tokens").type):
            expected = _with_type(expected, "tokens", pa.string())
    if not given.equals(expected):
        raise WireError(f"a payload has columns {given.names} of types {given.types}, not {expected.names}")


def _check_messages(stream: memoryview, dictionaries: int) -> None:
    """Refuse a stream that would need more memory than its own bytes. This is done before Arrow reads the
    stream.

    A valid stream is a schema, the given number of dictionaries (or none) and one batch; none of its messages
    is compressed. Each message has a marker, the size of its metadata, the metadata and a body; the metadata
    are a flatbuffer that tells the body's size.
    """
    kinds, at = [], 0
    while True:
        marker, size = struct.unpack_from("<Ii", stream, at)
        at += 8
        if marker != 0xFFFFFFFF or not 0 <= size <= _MAX_METADATA:
            raise WireError(
                "a payload is damaged: a message of its Arrow stream has an invalid or too large size"
            )
        if not size:
            break
        metadata = stream[at : at + size]
        kind, body = _check_message(metadata)
        kinds.append(kind)
        at += size + body
        if at > len(stream):
            raise WireError("a payload is damaged: its Arrow stream is truncated")
    if at != len(stream) or kinds not in ([_SCHEMA, *[_DICTIONARY] * n, _BATCH] for n in (0, dictionaries)):
        raise WireError("a payload is not an Arrow stream of one batch")


def _check_message(metadata: memoryview) -> tuple[int, int]:
    """Read a message's kind, and the size of its body in bytes. Refuse a batch that is compressed or too
    long.
    """
    message = _number("<I", metadata, 0)
    kind = _number("<B", metadata, _field(metadata, message, 1))
    header = _table(metadata, _field(metadata, message, 2))
    body = _number("<q", metadata, _field(metadata, message, 3))
    if kind == _DICTIONARY:
        if _number("<B", metadata, _field(metadata, header, 2)):
            raise WireError("a payload has a dictionary in several messages")
        header = _table(metadata, _field(metadata, header, 1))
    if kind in {_DICTIONARY, _BATCH}:
        rows = _number("<q", metadata, _field(metadata, header, 0))
        if not 0 <= rows <= MAX_CHUNK_ROWS:
            raise WireError(f"a chunk of {rows:,} rows is over the limit of {MAX_CHUNK_ROWS:,}")
        if _field(metadata, header, 3) is not None:
            raise WireError("a payload has a compressed message inside its Arrow stream")
    if body < 0:
        raise WireError("a payload is damaged: a message of its Arrow stream has a negative size")
    return kind, body


def _field(flatbuffer: memoryview, table: int, number: int) -> int | None:
    """Return the offset of a field in a flatbuffer's table, or ``None`` for an absent field."""
    fields = table - _number("<i", flatbuffer, table)
    place = 4 + 2 * number
    if place >= _number("<H", flatbuffer, fields):
        return None
    offset = _number("<H", flatbuffer, fields + place)
    return table + offset if offset else None


def _table(flatbuffer: memoryview, field: int | None) -> int:
    return (field or 0) + _number("<I", flatbuffer, field)


def _number(form: str, flatbuffer: memoryview, at: int | None) -> int:
    if at is None:
        return 0
    if at < 0:  # Python would count a negative offset from the end
        raise WireError("a payload is damaged: an offset in its Arrow stream is negative")
    return int(struct.unpack_from(form, flatbuffer, at)[0])


def as_arrow(scores: npt.NDArray[np.float32], missing: npt.NDArray[np.bool_]) -> pa.Array:
    """Make an Arrow array of scores ``[n]``, or an array of lists of scores ``[n, labels]``.

    Rows that are `missing` are null.
    """
    if scores.ndim == 1:
        return pa.array(scores, mask=missing)
    return pa.FixedSizeListArray.from_arrays(scores.ravel(), scores.shape[1], mask=pa.array(missing))
