"""The options of score-file as one object, which submitted runs and batches send to runners."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.home import expanded, model_folder
from rankmill.jobs.contract.schema import FORMAT, MAX_CHUNK_ROWS, Inputs, Weight, WireModel
from rankmill.jobs.contract.spec import ScoreSpec

STANDARD_STREAM = "-"
"""The path that stands for standard input or, as an output, for standard output."""

DATASET = "irds:"
"""A path that begins with this prefix names a data set of the package ir_datasets."""

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
"""Delimiters that are detected in CSV files, by their names in options."""


def _read_shard(given: object) -> object:
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given) if isinstance(given, str) else None
    if isinstance(given, str) and not match:
        raise ValueError(f"{given!r} is not a part of a whole: write K/N, such as 3/8")
    return match.groups() if match else given


def _check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= shard[0] <= shard[1]:
        raise ValueError(f"'{shard[0]}/{shard[1]}' is not a part of a whole: write K/N, such as 3/8")
    return shard


def _check_delimiter(given: str) -> str:
    if given not in DELIMITERS and (len(given) > 1 or not given.isascii() or given in '"\r\n'):
        raise ValueError(f"{given!r} is not one character, or one of {', '.join(DELIMITERS)}")
    return given


def _check_webhook(url: str) -> str:
    parts = urlsplit(url)  # raises ValueError if the URL is not valid, as `port` does
    if not parts.hostname or parts.port == 0 or parts.username is not None:
        raise ValueError("not a URL that can be called")
    return url


# The help of commands shows the `title` of an option's type in place of a value: NAME in `--tag NAME`.
Name = Annotated[str, Field(min_length=1)]
File = Annotated[Name, Field(title="FILE")]
Files = Annotated[tuple[File, ...], Field(title="FILE")]
Column = Annotated[Name, Field(title="NAME")]
Columns = Annotated[tuple[Column, ...], Field(title="NAME,...")]
OnDuplicate = Literal["error", "first", "last"]
Positive = Annotated[int, Field(ge=1, title="N")]
Shard = Annotated[
    tuple[int, int], BeforeValidator(_read_shard), AfterValidator(_check_shard), Field(title="K/N")
]
Delimiter = Annotated[Name, AfterValidator(_check_delimiter), Field(title="TEXT")]


class FileRequest(WireModel):
    """The files to score, and how to score them.

    Each field but the first is an option of ``score-file`` and ``rankmill submit``, in this order. A field's
    docstring is the option's help, except for ``models``. The gateway's batches also have some of these
    options.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    inputs: Files = ()
    """Files of pairs, folders, patterns, or - for standard input."""
    run: File | None = None
    """Score a run: TREC, TSV, JSONL or Parquet with ids of queries and passages."""
    queries: Files = ()
    """Texts of the run's queries: TSV, JSONL or Parquet."""
    corpus: Files = ()
    """Texts of the run's passages: TSV, JSONL or Parquet."""
    queries_id: Column | None = None
    """Column with the queries' ids.  [default: the only column with a known name]"""
    queries_text: Columns = ()
    """Column with the queries' texts. If you name several, their texts are joined.
    [default: the only column with a known name]"""
    corpus_id: Column | None = None
    """Column with the passages' ids.  [default: the only column with a known name]"""
    corpus_text: Columns = ()
    """Column with the passages' texts. If you name several, their texts are joined.
    [default: title, if it exists, and the only column with a known name]"""
    on_duplicate: OnDuplicate = "error"
    """What to do if the queries or the corpus have two texts with the same id: stop with an error, or take
    the first or the last text.
    """
    depth: Positive | None = None
    """Score only the N best passages of each query of the run, by the run's scores, or by its ranks if it has
    no scores.
    """
    qrels: File | None = None
    """Judgements: add labels, and the relevant passages that the run lacks."""
    with_texts: bool = False
    """Include query and passage in the output of a run."""
    output: File | None = None
    """File to write: .parquet, .arrow, .feather, .csv, .tsv, .jsonl, .trec; text also .gz or .zst; or - for
    standard output.  [default: <input stem>.scored.parquet]"""
    output_format: Annotated[Name, Field(title="FORMAT")] | None = None
    """Format of the output: parquet, csv, tsv, jsonl, trec, arrow, or one that another package adds.
    [default: by the output's name; on standard output INPUT's format; --run and INPUT - then need a FORMAT]
    """
    top_k: Positive | None = None
    """Keep the N best passages of each query, ranked.  [default: all]"""
    tag: Column = "rankmill"
    """Name of the run in TREC output."""
    query_column: Column = "query"
    """Column with the query."""
    passage_column: Column = "passage"
    """Column with the passage."""
    text_column: Column | None = None
    """Column with single texts to score, in place of queries and passages."""
    messages_column: Columns = ()
    """Column with conversations, which are lists of {role, content}; CHOSEN,REJECTED scores two columns."""
    score_column: Column = "score"
    """Column to add for the score. For several models, list NAME,NAME,..., or each gets NAME_MODEL."""
    rank_column: Column = "rank"
    """Column to add for the rank (--top-k)."""
    query_id_column: Column | None = None
    """Column with the query's id (--top-k, TREC).  [default: query_id, qid, ...]"""
    passage_id_column: Column | None = None
    """Column with the passage's id (TREC).  [default: passage_id, doc_id, ...]"""
    text_columns: Columns = ()
    """Columns of JSON or Parquet to read as text."""
    list_columns: Columns = ()
    """Columns with lists, such as the passages of a query; each item becomes a row."""
    columns: Columns = ()
    """Names of all columns, in order, if CSV or TSV files have no header; with --run, those of the corpus."""
    delimiter: Delimiter | None = None
    """Character between two fields of CSV or TSV.  [default: detected]"""
    limit: Positive | None = None
    """Score only the first N rows."""
    shard: Shard | None = None
    """Score only the K-th of N equal parts; rankmill merge joins the parts."""
    rows_per_part: Positive | None = None
    """Write a folder of files with N rows each; each file appears when it is complete."""
    reuse: File | None = None
    """Take scores from an earlier output of the same model, and score only the other pairs."""
    models: tuple[Name, ...] = ()
    """All models, if the request has several; each gets a column."""
    mean: Literal["ranks", "scores"] | None = None
    """For several models: add the mean of the ranks, or of the standardized scores, within each query."""
    on_null: Literal["error", "fail"] = "error"
    """What to do about a null text or, with --run, a missing id: error gives that row an error, fail stops
    before any work.
    """
    force: bool = False
    """Replace an existing output."""
    restart: bool = False
    """Start over, and drop the scores of an interrupted run."""

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        run = (self.run, self.queries, self.corpus)
        if any(run) and not all(run):
            raise ValueError("--run, --queries and --corpus belong together")
        of_run = {
            "--depth": self.depth,
            "--qrels": self.qrels,
            "--with-texts": self.with_texts,
            "--queries-id": self.queries_id,
            "--queries-text": self.queries_text,
            "--corpus-id": self.corpus_id,
            "--corpus-text": self.corpus_text,
            "--on-duplicate": self.on_duplicate != "error",
        }
        if not all(run) and (option := next((option for option, value in of_run.items() if value), None)):
            raise ValueError(f"{option} is for a run: give --run, --queries and --corpus, or --dataset")
        if self.kind_of_rows != "pairs":
            self._check_rows()
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"--columns names each column once, not {','.join(self.columns)}")
        if len(self.models) == 1 or len(set(self.models)) < len(self.models):
            raise ValueError(f"--model names each of several models once, not {', '.join(self.models)}")
        if self.mean and not self.models:
            raise ValueError("--mean needs several models: name each with --model")
        return self

    def _check_rows(self) -> None:
        option = "--text-column" if self.text_column else "--messages-column"
        if self.text_column and self.messages_column:
            raise ValueError("--text-column and --messages-column: rows are texts or conversations, not both")
        pairs = ("run", "query_column", "passage_column")
        if other := next((name for name in pairs if self.is_given(name)), None):
            raise ValueError(f"--{other.replace('_', '-')} is for pairs: leave it out, or {option}")
        if len(set(self.messages_column)) < len(self.messages_column) or len(self.messages_column) > 2:
            raise ValueError("--messages-column names one column, or two: CHOSEN,REJECTED")
        if len(self.messages_column) > 1 and self.models:
            raise ValueError("--model: two columns of conversations are scored with one model")
        if self.messages_column and self.on_null == "fail":
            raise ValueError("--on-null fail looks at texts, not at --messages-column: leave it out")

    @property
    def kind_of_rows(self) -> Inputs:
        return "texts" if self.text_column else "conversations" if self.messages_column else "pairs"

    def is_given(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @property
    def reads_stdin(self) -> bool:
        return STANDARD_STREAM in self.inputs

    @property
    def read_names(self) -> Iterator[str]:
        """Yield the paths of all files that the request reads, except models."""
        single = (self.run, self.qrels, self.reuse)
        yield from (*self.inputs, *self.queries, *self.corpus, *filter(None, single))

    def run_models(self, model: str) -> tuple[str, ...]:
        """Return the name of the model for each score column.

        If the request lists ``models``, each model has a column. Otherwise, all columns are for `model`: one
        column, or two for chosen and rejected conversations.
        """
        return self.models or (model,) * max(len(self.messages_column), 1)

    @property
    def relative_path(self) -> str | None:
        given = (*self.read_names, self.output)
        return next((path for path in given if path and not _is_absolute(path)), None)

    def at_home(self) -> FileRequest:
        """Return this request with absolute paths, for a process that works in another folder.

        Raises
        ------
        InputError
            The request lacks an input or an output, has both files of pairs and a run, or names a standard
            stream.
        """
        if not self.output:
            raise InputError("name the output of a submitted run: with -o, or output=")
        if self.output == STANDARD_STREAM:
            raise InputError("a submitted run has no standard output (-); name a file that runners can write")
        if self.reads_stdin:
            raise InputError("standard input (-) cannot be submitted; give files that runners see as well")
        if bool(self.inputs) == bool(self.run):
            raise InputError(
                "give either INPUT files of pairs, or --run with --queries and --corpus, or --dataset"
            )
        several = {
            name: tuple(map(_absolute, getattr(self, name))) for name in ("inputs", "queries", "corpus")
        }
        single = {
            name: _absolute(path)
            for name in ("output", "run", "qrels", "reuse")
            if (path := getattr(self, name))
        }
        models = tuple(_absolute(model) if model_folder(model) else model for model in self.models)
        return self.model_copy(update={**several, **single, "models": models})


def _is_absolute(path: str) -> bool:
    return "://" in path or path.startswith(DATASET) or os.path.isabs(path)  # noqa: PTH117


def _absolute(path: str) -> str:
    return path if _is_absolute(path) else os.path.abspath(expanded(path))  # noqa: PTH100 -- paths may be globs


class FileOrder(WireModel):
    """A submitted run of files, as a runner (a process that scores submitted files) gets it.

    It is the only argument of the RQ job ``rankmill.score_file``.

    Attributes
    ----------
    queue, chunk_size
        ``None`` means that the runner's settings decide.
    kind
        Name of the entry point in the group ``rankmill.orders`` that carries out the run; ``None`` for a run
        of files.
    details
        Further fields for a run of this `kind`; empty for a run of files.
    tenant
        The tenant for whom the files are scored; ``None`` is the tenant whose name is empty.
    """

    optional = frozenset({"queue", "chunk_size", "webhook", "kind", "details", "tenant", "weight"})

    request: FileRequest
    spec: ScoreSpec
    queue: Name | None = None
    chunk_size: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_CHUNK_ROWS)] | None = None
    webhook: (
        Annotated[str, Field(max_length=2000, pattern=r"^https?://[!-~]+$"), AfterValidator(_check_webhook)]
        | None
    ) = None
    kind: Name | None = None
    details: dict[str, JsonValue] = Field(default_factory=dict)
    tenant: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    weight: Weight | None = None

    @property
    def models(self) -> tuple[str, ...]:
        return self.request.run_models(self.spec.model)

    def arguments(self) -> tuple[dict[str, object]]:
        return ({"format": FORMAT, **self.model_dump(mode="json", exclude_none=True)},)
