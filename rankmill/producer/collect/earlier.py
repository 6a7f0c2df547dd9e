"""The scores of an earlier output, by pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.repeats import as_bytes

Keys = npt.NDArray[np.uint64]
Scores = npt.NDArray[np.float32]


class EarlierScores:
    """The scores of an earlier output. A pair is found by a digest of 128 bits, which takes 20 bytes of
    memory with its score.

    Parameters
    ----------
    columns
        The columns of query and passage.
    keys
        The digests of the pairs, ``[n, 2]``.
    scores
        The scores of the pairs, ``[n]``.
    kind
        For a deterministic output, what decides the bits of its scores (`ChunkStats.kind`).
    """

    def __init__(self, columns: tuple[str, ...], keys: Keys, scores: Scores, kind: str | None = None) -> None:
        order = np.argsort(keys[:, 0], kind="stable")
        self.columns, self.kind = columns, kind
        self._keys, self._scores = keys[order], scores[order]

    def __len__(self) -> int:
        return len(self._scores)

    def digests(self, table: pa.Table) -> Keys:
        """The digest of each row's pair, ``[n, 2]``."""
        return _digests([table[name] for name in self.columns])

    def known(self, keys: Keys) -> pa.Array:
        """The known score of each pair, by its digest; null if it has none."""
        if not len(self):
            return pa.nulls(len(keys), pa.float32())
        places = np.minimum(np.searchsorted(self._keys[:, 0], keys[:, 0]), len(self) - 1)
        missing = (self._keys[places] != keys).any(axis=1)
        return pa.array(self._scores[places], mask=missing)


def no_earlier(columns: tuple[str, ...]) -> EarlierScores:
    """Make an object without scores, for pairs in these columns."""
    return EarlierScores(columns, np.zeros((0, 2), np.uint64), np.zeros(0, np.float32))


def read_earlier(
    batches: Iterable[pa.RecordBatch], columns: tuple[str, ...], score: str, kind: str | None = None
) -> EarlierScores:
    """Read the pairs and scores of an output; rows without a score are left out.

    Parameters
    ----------
    batches
        The rows of the output, with these columns.
    columns, score
        The columns of query and passage, and of the scores.
    kind
        As in `EarlierScores`.
    """
    keys, scores = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.float32)]
    for batch in batches:
        kept = batch.filter(batch[score].is_valid())
        keys.append(_digests([pa.chunked_array([kept[name]]) for name in columns]))
        scores.append(np.asarray(kept[score]).astype(np.float32))
    return EarlierScores(columns, np.concatenate(keys), np.concatenate(scores), kind)


def check_same(found: Mapping[str, str], wanted: Mapping[str, str], name: str) -> None:
    """Check that an output was made as this run would make it.

    Parameters
    ----------
    found
        The output's metadata.
    wanted
        The metadata of the run's output; if an entry of `OPEN` is empty, the run takes the earlier value.
    name
        Name of the output, for messages.

    Raises
    ------
    InputError
        The metadata differ, or an entry is missing.
    """
    if "rankmill.version" not in found:
        raise InputError(f"{name}: --reuse needs an output of score-file, which says how it was made")
    revision = found.get("rankmill.revision", "")
    if not revision and found.get("rankmill.model") != "demo":
        raise InputError(
            f"{name}: its scores cannot be used, it does not say which commit or which content the model had"
        )
    compared = OF_SCORES | COLUMNS
    for key in sorted(compared, key=lambda each: each != "rankmill.revision"):  # the telling entry first
        given, asked = found.get(key, ""), wanted.get(key, "")
        if key == "rankmill.model" and revision and revision == wanted.get("rankmill.revision"):
            continue  # the same files may be in another directory
        if given != asked and (asked or key not in OPEN):
            what = key.removeprefix("rankmill.").replace("_", " ")
            raise InputError(
                f"{name}: its scores cannot be used, they are of another {what}: "
                f"{given or 'none'}, not {asked or 'none'}"
            )


OF_SCORES = {
    f"rankmill.{name}"
    for name in (
        "model", "revision", "precision", "max_length", "activation", "instruction",
        "prompt_template", "label", "long", "long_stride", "all_labels", "deterministic", "truncation_side",
        "max_passage_tokens", "inputs",
    )
}  # fmt: skip
"""Metadata that scores depend on."""

COLUMNS = {f"rankmill.{name}_column" for name in ("query", "passage", "text", "score")}
"""Metadata that say which texts were scored, and which column has the scores."""

OPEN = {"rankmill.revision", "rankmill.precision"}
"""Metadata that a run need not name, because it takes those of the earlier output."""


def _digests(columns: list[pa.ChunkedArray]) -> Keys:
    """A digest of each pair, ``[n, 2]``."""
    texts = [as_bytes(column).to_pylist() for column in columns]
    queries = {text: blake2b(_bytes(text), digest_size=16).digest() for text in set(texts[0])}
    if len(texts) == 1:
        joined = b"".join(map(queries.__getitem__, texts[0]))
    else:
        joined = b"".join(
            blake2b(_bytes(passage), digest_size=16, key=queries[query]).digest()
            for query, passage in zip(*texts, strict=True)
        )
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def _bytes(text: bytes | None) -> bytes:
    return b"\0" if text is None else b"\1" + text
