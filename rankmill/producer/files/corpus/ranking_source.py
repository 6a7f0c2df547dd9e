"""Reads the pairs of a ranking, and looks up their texts in the queries and the corpus when needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import OnDuplicate
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.files.corpus.index import TextIndex, in_memory, on_disk
from rankmill.producer.files.corpus.rankings import SCHEMA, read_qrels, read_ranking
from rankmill.producer.files.corpus.texts import CORPUS, QUERIES, TextFields, taken
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.inputs import RankingFiles
from rankmill.producer.files.ranking import Repeats, best_first, starts_of
from rankmill.producer.files.source import PairSource, Shard, cut_range
from rankmill.producer.files.stores.paths import AnyPath

_TEXT_FIELDS = [pa.field("query", pa.dictionary(pa.int32(), pa.string())), pa.field("passage", pa.string())]
_LABEL_FIELDS = [pa.field("relevance", pa.int64()), pa.field("in_run", pa.bool_())]

_ROWS_AT_ONCE = 16_384
"""The passages of this many rows are read into one buffer. A larger buffer would be slower, because the
system clears its memory each time.
"""

_Labels = dict[tuple[str, str], int]


class RankingSource(PairSource):
    """Reads the pairs of a ranking (a run file) in its order, and looks up their texts.

    The columns are ``query``, ``passage`` and the columns of every ranking (`rankings.SCHEMA`). Judgements
    add ``relevance`` and ``in_run``. If an id is in no file, its text is null, and `explain` names the id in
    the row's error.

    Parameters
    ----------
    files
        The run, its queries, its corpus, and perhaps judgements.
    fingerprints
        The `fingerprint` of each of ``files.all``.
    allow_missing
        Whether a pair with an unknown id becomes a row error. If not, such a pair ends the command before any
        row is scored. Null texts and empty queries always become row errors.
    on_duplicate
        What to do with an id that has two texts in the queries or the corpus.
    queries, corpus
        The columns of the files with queries, and of the files with the corpus.
    limit
        Score at most this many rows of the run. Relevant passages that come only from judgements are not
        counted.
    shard
        The part of the rows within `limit` to score; default: all.

    Raises
    ------
    InputError
        A file cannot be read, an id has two texts, a query has a passage twice, a text is missing, or
        ``files.depth`` is set and the passages of a query are not in consecutive rows.
    OutputError
        The index of the corpus or a temporary file cannot be written.
    """

    columns = TextColumns("query", "passage")

    def __init__(
        self,
        files: RankingFiles,
        fingerprints: Iterable[str],
        *,
        allow_missing: bool,
        on_duplicate: OnDuplicate = "error",
        queries: TextFields = QUERIES,
        corpus: TextFields = CORPUS,
        limit: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._input, self._ranking = files, files.ranking.path
        self._limit = limit
        marks = tuple(fingerprints)
        paths = [[file.path for file in side] for side in (files.queries, files.corpus)]
        first = 1 + len(files.queries)
        self._queries = in_memory(paths[0], on_duplicate, queries)
        self._corpus = on_disk(paths[1], marks[first : first + len(paths[1])], on_duplicate, corpus)
        self.taken = taken(paths[0], queries) | taken(paths[1], corpus)
        self._labels = _labels(files.qrels.path) if files.qrels else None
        self._id_schema = pa.schema([*SCHEMA, *(_LABEL_FIELDS if files.qrels else [])])
        self.schema = pa.schema([*self._id_schema, *_TEXT_FIELDS])
        rows, repeats = 0, Repeats("query_id", "doc_id")
        for batch in self._all_ids():
            if not allow_missing:
                self._check_there(batch)
            repeats.add(batch)
            rows += len(batch)
        if twice := repeats.first(self._all_ids):
            raise InputError(f"{self._ranking}: query {twice[0]!r} has passage {twice[1]!r} twice; keep one")
        super().__init__(files.all, marks, rows, shard)

    def select(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield columns of the shard's rows, except the texts (``query`` and ``passage``)."""
        wanted = list(names)
        return (batch.select(wanted) for batch in self._ids())

    def explain(self, part: ScoredTable) -> ScoredTable:
        """In the error of each row without a text, name the id that has no text."""
        if part.errors.null_count == len(part.errors):
            return part
        errors = part.errors.to_pylist()
        # Look at the passages first, and then at the queries. If a row has neither text, the second error
        # replaces the first one, so the row's error names the query.
        for text, key, _, names in reversed(self._texts()):
            column = part.table[text].combine_chunks()
            for row in np.flatnonzero(np.asarray(pc.is_null(column))):
                if errors[row] is not None:
                    errors[row] = f"no text for {key} {part.table[key][row].as_py()!r} in {names}"
        return replace(part, errors=pa.array(errors, pa.string()))

    def _batches(self, start: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return chain.from_iterable(map(self._with_texts, self._ids(start)))

    def _ids(self, start: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the shard, from its row `start` on."""
        return cut_range(self._all_ids(), self._start + start, self._stop)

    def _all_ids(self) -> Iterator[pa.RecordBatch]:
        """Yield the ids of all pairs to score, in all shards."""
        batches = read_ranking(self._ranking)
        if self._input.depth is not None:
            batches = _cut_queries(batches, self._ranking, self._input.depth)
        if self._limit is not None:
            batches = cut_range(batches, 0, self._limit)
        return batches if self._labels is None else self._labelled(batches, self._labels)

    def _labelled(self, batches: Iterator[pa.RecordBatch], labels: _Labels) -> Iterator[pa.RecordBatch]:
        """Yield the `batches` of the run with two more columns, ``relevance`` and ``in_run``. A further batch
        follows: it has a row for each passage that is relevant for a query of the run, but is not in the run.
        """
        lacking = {pair: label for pair, label in labels.items() if label > 0}
        queries: set[str] = set()
        for batch in batches:
            pairs = list(zip(batch["query_id"].to_pylist(), batch["doc_id"].to_pylist(), strict=True))
            grades = [labels.get(pair) for pair in pairs]
            for pair, label in zip(pairs, grades, strict=True):
                if label:
                    lacking.pop(pair, None)
            queries.update(pc.unique(batch["query_id"]).to_pylist())
            added = [pa.array(grades, pa.int64()), pa.array([True] * len(batch))]
            yield pa.record_batch([*batch.columns, *added], schema=self._id_schema)
        rows = [
            {"query_id": query, "doc_id": doc, "relevance": label, "in_run": False}
            for (query, doc), label in lacking.items()
            if query in queries
        ]
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=self._id_schema)

    def _texts(self) -> list[tuple[str, str, TextIndex, str]]:
        """Return a tuple for queries and one for passages. Each has the text column, the id column, the index
        of texts and the files' names.
        """
        queries, corpus = (
            ", ".join(str(file.path) for file in files) for files in (self._input.queries, self._input.corpus)
        )
        return [
            ("query", "query_id", self._queries, queries),
            ("passage", "doc_id", self._corpus, corpus),
        ]

    def _with_texts(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        queries = pc.dictionary_encode(batch["query_id"])
        texts = _present(self._queries, queries.dictionary)
        is_there = pc.is_valid(texts).take(queries.indices)
        places = pc.if_else(is_there, queries.indices, pa.scalar(None, pa.int32()))
        # a missing text is null in the indices, because a dictionary in Parquet cannot contain null
        query = pa.DictionaryArray.from_arrays(places, pc.fill_null(texts, ""))
        rows = self._corpus.find(batch["doc_id"])
        for row in range(0, len(batch), _ROWS_AT_ONCE):
            ids = batch.slice(row, _ROWS_AT_ONCE)
            passage = self._corpus.take(rows[row : row + _ROWS_AT_ONCE])
            columns = [*ids.columns, query.slice(row, _ROWS_AT_ONCE), passage]
            yield pa.record_batch(columns, schema=self.schema)

    def _check_there(self, batch: pa.RecordBatch) -> None:
        for _, key, index, names in self._texts():
            missing = np.flatnonzero(index.find(batch[key]) < 0)
            if len(missing):
                first = batch[key][int(missing[0])].as_py()
                raise InputError(
                    f"{self._ranking}: {key} {first!r} is not in {names}; "
                    "leave out --on-null fail to have it reported as a row error"
                )


def _labels(path: AnyPath) -> _Labels:
    frame = read_qrels(path)
    return dict(zip(zip(frame["query_id"], frame["doc_id"], strict=True), frame["relevance"], strict=True))


def _present(index: TextIndex, ids: pa.Array) -> pa.StringArray:
    """Look up the texts of `ids` in an index. An empty text becomes null, because it cannot be scored."""
    texts = index.take(index.find(ids))
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), pa.scalar(None, pa.string()), texts)


def _cut_queries(batches: Iterator[pa.RecordBatch], path: AnyPath, depth: int) -> Iterator[pa.RecordBatch]:
    """Keep the best `depth` passages of each query, by score. If a query has no scores, its ranks decide;
    without ranks, the order of the file does.
    """
    seen: set[int] = set()
    rest: pa.RecordBatch | None = None
    for batch in batches:
        whole = batch if rest is None else pa.concat_batches([rest, batch])
        starts = starts_of(whole["query_id"])
        last = int(starts[-1]) if len(starts) else 0
        if last:
            yield _best(whole.slice(0, last), starts[:-1], path, seen, depth)
        rest = whole.slice(last)
    if rest is not None and len(rest):
        yield _best(rest, starts_of(rest["query_id"]), path, seen, depth)


def _best(
    batch: pa.RecordBatch, starts: npt.NDArray[np.int64], path: AnyPath, seen: set[int], depth: int
) -> pa.RecordBatch:
    """Keep the best `depth` rows of each query in `batch`. `starts` are the first rows of its queries."""
    for start in starts:
        query = batch["query_id"][int(start)].as_py()
        if hash(query) in seen:
            raise InputError(
                f"{path}: the passages of query {query!r} do not follow each other, which --depth needs; "
                "sort the run by its queries"
            )
        seen.add(hash(query))
    sizes = np.diff(np.r_[starts, len(batch)])
    numbers = np.repeat(np.arange(len(starts)), sizes)
    scores = batch["run_score"].to_numpy(zero_copy_only=False).astype(np.float64)
    has_scores = (np.bincount(numbers, ~np.isnan(scores)) > 0)[numbers]
    ranks = batch["run_rank"].to_numpy(zero_copy_only=False).astype(np.float64)
    by_score = best_first(numbers, scores, batch["doc_id"])
    by_rank = best_first(numbers, -ranks, None)
    # A query's rows have the same places in `by_score` and in `by_rank`. So the order can be chosen for each
    # query: by score if the query has scores, else by rank.
    order = np.where(has_scores[by_score], by_score, by_rank)
    places = np.arange(len(batch)) - np.repeat(starts, sizes)
    kept = np.sort(order[places < depth])
    return batch.take(pa.array(kept))
