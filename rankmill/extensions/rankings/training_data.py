"""Makes rows of training data from mined negatives, in the forms that trainers read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from rankmill.extensions.rankings.mine import Mined, TextKeys
from rankmill.extensions.rankings.scored import scored_column
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import OnDuplicate
from rankmill.producer.files.corpus.index import TextIndex, in_memory, on_disk
from rankmill.producer.files.corpus.texts import CORPUS, QUERIES, TextFields, taken
from rankmill.producer.files.formats.table import is_readable, open_reader
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import fingerprint

Form = Literal[
    "triplet", "n-tuple", "labeled-pair", "labeled-list", "flagembedding", "tevatron", "pylate", "msmarco"
]

_ROWS = 16_384

_WAY_OUT = "make it with score-file --with-texts, or name --queries and --corpus"

_Rows = npt.NDArray[np.int64]
_Keys = npt.NDArray[np.uint64]
_Texts = tuple[dict[int, str], dict[int, str]]
_Row = dict[str, object]


@dataclass(frozen=True)
class Corpus:
    """The files with the texts of queries and passages, by id.

    Attributes
    ----------
    queries, passages
        The files.
    query_fields, passage_fields
        Names of the columns with the ids and the texts in these files.
    on_duplicate
        What happens if an id has two texts.
    """

    queries: Sequence[AnyPath]
    passages: Sequence[AnyPath]
    query_fields: TextFields = QUERIES
    passage_fields: TextFields = CORPUS
    on_duplicate: OnDuplicate = "error"

    @property
    def taken(self) -> dict[str, str]:
        """Says which columns are read: ``{"queries": "id '_id', text 'text'", "corpus": …}``."""
        return taken(self.queries, self.query_fields) | taken(self.passages, self.passage_fields)

    def texts_of(self, ids: pd.DataFrame, rows: _Rows) -> _Texts:
        """The texts of the queries and passages of some rows; raises `InputError` if a query or passage has
        no text.
        """
        queries = _by_row(self._query_texts, ids, "query_id", rows)
        return queries, _by_row(self._passage_texts, ids, "doc_id", rows)

    def keys_of(self, ids: pd.DataFrame) -> TextKeys:
        return TextKeys(_keys(self._query_texts, ids["query_id"]), _keys(self._passage_texts, ids["doc_id"]))

    @cached_property
    def _query_texts(self) -> TextIndex:
        return in_memory(self.queries, self.on_duplicate, self.query_fields)

    @cached_property
    def _passage_texts(self) -> TextIndex:
        marks = [fingerprint(path) for path in self.passages]
        return on_disk(self.passages, marks, self.on_duplicate, self.passage_fields)


class _Passage(NamedTuple):
    id: str
    text: str
    score: float


class _Query(NamedTuple):
    """A query with its mined passages; the negatives are sorted, hardest first."""

    id: str
    text: str
    positives: list[_Passage]
    negatives: list[_Passage]


def with_rows(mined: Iterable[Mined], form: Form, num_negatives: int) -> list[Mined]:
    """Return the queries that have enough negatives for a row of training data in the layout of `form`.

    - ``labeled-pair``: no negative is needed.
    - ``n-tuple`` and ``pylate``: `num_negatives` negatives are needed, because all rows have the same length.
    - All others: one negative is needed.
    """
    needed = {"labeled-pair": 0, "n-tuple": num_negatives, "pylate": num_negatives}.get(form, 1)
    return [query for query in mined if len(query.negatives) >= needed]


def text_keys(source: AnyPath | Corpus, ids: pd.DataFrame) -> TextKeys | None:
    """Hash the texts of all rows of a scored file. Equal texts have equal hashes. Returns ``None`` if there
    are no texts.

    Parameters
    ----------
    source
        The scored file itself, or files with the texts.
    ids
        The rows of the scored file, as `mine.read_scored` returns them.
    """
    if isinstance(source, Corpus):
        return source.keys_of(ids)
    if not is_readable(source):
        return None
    columns = scored_column(source, "query"), scored_column(source, "passage")
    if not set(columns) <= set(open_reader(source).survey(find_nulls=False).schema.names):
        return None
    keys = [(np.zeros(0, np.uint64), np.zeros(0, np.uint64))]  # for a file without rows
    for batch in _text_batches(source, columns):
        keys.append((_hashes(batch[columns[0]]), _hashes(batch[columns[1]])))
    # `ids` also has rows for judged passages that the file lacks
    lacking = np.zeros(len(ids) - sum(len(part) for part, _ in keys), np.uint64)
    return TextKeys(*(_apart(np.concatenate([*side, lacking])) for side in zip(*keys, strict=True)))


def training_rows(
    mined: Sequence[Mined], ids: pd.DataFrame, source: AnyPath | Corpus, form: Form, *, with_scores: bool
) -> pa.Table:
    """Make a table of training data in the layout of `form`.

    Parameters
    ----------
    mined
        Queries that have enough negatives for the layout, from `with_rows`.
    ids
        The rows of the scored file, as `mine.read_scored` returns them.
    source
        The scored file itself, or files with the texts.
    form
        The layout, named after the trainer or its rows.
    with_scores
        Adds scores to distil from, in place of labels. FlagEmbedding's and pylate's rows always have scores.

    Raises
    ------
    InputError
        A text is missing.
    """
    rows = np.unique(np.concatenate([np.r_[chosen.positives, chosen.negatives] for chosen in mined] or [[]]))
    rows = rows.astype(np.int64)
    if form == "msmarco":  # ids, and no texts
        queries = texts = dict.fromkeys(rows.tolist(), "")
    elif isinstance(source, Corpus):
        queries, texts = source.texts_of(ids, rows)
    else:
        queries, texts = _texts_in(source, rows)
    names, scores = ids["doc_id"].to_list(), ids["score"].to_list()

    def passages_of(rows: _Rows) -> list[_Passage]:
        return [_Passage(names[row], texts[row], scores[row]) for row in rows.tolist()]

    made: list[_Row] = []
    for chosen in mined:
        first, passages = int(chosen.positives[0]), map(passages_of, (chosen.positives, chosen.negatives))
        query = _Query(str(ids["query_id"].iloc[first]), queries[first], *passages)
        made.extend(_rows_of(query, form, with_scores))
    return pa.Table.from_pylist(made)


def _rows_of(query: _Query, form: Form, with_scores: bool) -> Iterator[_Row]:
    if form == "labeled-pair":
        for label, passages in ((1, query.positives), (0, query.negatives)):
            for passage in passages:
                value = {"score": passage.score} if with_scores else {"label": label}
                yield {"anchor": query.text, "passage": passage.text, **value}
    elif form == "flagembedding":
        yield {
            "query": query.text,
            "pos": [passage.text for passage in query.positives],
            "neg": [passage.text for passage in query.negatives],
            "pos_scores": [passage.score for passage in query.positives],
            "neg_scores": [passage.score for passage in query.negatives],
        }
    elif form == "tevatron":
        yield {
            "query_id": query.id,
            "query": query.text,
            "positive_passages": [_of_tevatron(passage, with_scores) for passage in query.positives],
            "negative_passages": [_of_tevatron(passage, with_scores) for passage in query.negatives],
        }
    else:
        one_each = form in {"triplet", "msmarco"}
        negatives = [[negative] for negative in query.negatives] if one_each else [query.negatives]
        for positive, others in product(query.positives, negatives):
            yield _row(query, [positive, *others], form, with_scores)


def _row(query: _Query, passages: list[_Passage], form: Form, with_scores: bool) -> _Row:
    """Make a row of training data in the layout of `form`. `passages` has a positive passage first, and then
    its negatives.
    """
    names, texts, scores = (list(values) for values in zip(*passages, strict=True))
    if form == "msmarco":
        margin = {"score": scores[0] - scores[1]} if with_scores else {}
        return {"query_id": query.id, "positive_id": names[0], "negative_id": names[1], **margin}
    if form == "pylate":
        return {
            "query": query.text, "documents": texts, "scores": scores,
            "query_id": query.id, "document_ids": names,
        }  # fmt: skip
    row: _Row = {"anchor": query.text}
    if form == "labeled-list":
        row |= {"passages": texts} | ({} if with_scores else {"labels": [1] + [0] * (len(texts) - 1)})
    elif form == "triplet":
        row |= {"positive": texts[0], "negative": texts[1]}
    else:
        row |= {"positive": texts[0]} | {f"negative_{n}": text for n, text in enumerate(texts[1:], 1)}
    return row | {"scores": scores} if with_scores else row


def _of_tevatron(passage: _Passage, with_scores: bool) -> _Row:
    """Describe a passage in the layout that Tevatron reads. ``title`` is empty, because a passage's title is
    part of the text that was scored.
    """
    row: _Row = {"docid": passage.id, "title": "", "text": passage.text}
    return row | {"score": passage.score} if with_scores else row


def _texts_in(path: AnyPath, rows: _Rows) -> _Texts:
    """Read the texts of the queries and passages of some rows from the scored file. `rows` must be sorted."""
    if not is_readable(path):
        raise InputError(f"{path}: a run has no texts; name --queries and --corpus")
    columns = scored_column(path, "query"), scored_column(path, "passage")
    schema = open_reader(path).survey(find_nulls=False).schema
    for name in columns:
        if name not in schema.names:
            raise InputError(f"{path}: no column {name!r}; {_WAY_OUT}")
    queries: dict[int, str] = {}
    passages: dict[int, str] = {}
    start = 0
    for batch in _text_batches(path, columns):
        here = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + len(batch))]
        part = batch.take(pa.array(here - start))
        queries |= dict(zip(here.tolist(), part[columns[0]].to_pylist(), strict=True))
        passages |= dict(zip(here.tolist(), part[columns[1]].to_pylist(), strict=True))
        start += len(batch)
    for column, texts in zip(columns, (queries, passages), strict=True):
        empty = next((row for row, text in texts.items() if text is None), None)
        if empty is not None:
            raise InputError(f"{path}: row {empty} (counted from 0) has a score and no {column}")
    return queries, passages


def _text_batches(path: AnyPath, columns: tuple[str, str]) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([(name, pa.string()) for name in dict.fromkeys(columns)])
    return open_reader(path, schema.names).batches(schema, _ROWS)


def _by_row(index: TextIndex, ids: pd.DataFrame, name: str, rows: _Rows) -> dict[int, str]:
    wanted = pa.array(ids[name].iloc[rows], pa.string())
    texts = index.take(index.find(wanted))
    if texts.null_count:
        missing = wanted[texts.is_null().index(True).as_py()].as_py()
        raise InputError(
            f"no text for {name} {missing!r} in --{'queries' if name == 'query_id' else 'corpus'}"
        )
    return dict(zip(rows.tolist(), texts.to_pylist(), strict=True))


def _keys(index: TextIndex, ids: pd.Series[str]) -> _Keys:
    places, names = pd.factorize(ids)
    rows = index.find(pa.array(names, pa.string()))
    starts = range(0, max(len(rows), 1), _ROWS)  # at least one part, for a file without rows
    parts = [_hashes(index.take(rows[start : start + _ROWS])) for start in starts]
    return _apart(np.concatenate(parts))[places]


def _hashes(texts: pa.Array) -> _Keys:
    """Compute a hash of each text; 0 for a missing text."""
    hashed: _Keys = pd.util.hash_array(texts.fill_null("").to_numpy(zero_copy_only=False), categorize=False)
    hashed[np.asarray(texts.is_null())] = 0
    return hashed


def _apart(keys: _Keys) -> _Keys:
    """Give each missing text a key of its own, because two missing texts need not be equal."""
    missing = np.flatnonzero(keys == 0)
    keys[missing] = pd.util.hash_array(missing)
    return keys
