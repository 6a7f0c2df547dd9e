"""What score-file is asked to do, by the names of its options; as it is sent to runners."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_serializer, model_serializer, model_validator

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.schema import FORMAT, MAX_CHUNK_ROWS, WireModel
from rankmill.jobs.contract.spec import ScoreSpec

STANDARD_INPUT = "-"
"""The name that means standard input."""

DATASET = "irds:"
"""What names of ir_datasets' datasets begin with."""

OUTPUT_FORMATS = ("parquet", "csv", "tsv", "jsonl", "trec")

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
"""Delimiters that are noticed in CSV files, and the names by which people may call them."""

Name = Annotated[str, Field(min_length=1)]
Names = tuple[Name, ...]
Positive = Annotated[int, Field(ge=1)]
MaxFieldMib = Annotated[int, Field(ge=1, le=1024)]


class FileRequest(WireModel):
    """Files to score, and how; each field is the option of score-file with that name.

    ``models`` are all models, if there are several.
    """

    inputs: Names = ()
    output: Name | None = None
    run: Name | None = None
    queries: Names = ()
    corpus: Names = ()
    depth: Positive | None = None
    qrels: Name | None = None
    with_texts: bool = False
    output_format: Name | None = None
    top_k: Positive | None = None
    tag: Name = "rankmill"
    query_column: Name = "query"
    passage_column: Name = "passage"
    score_column: Name = "score"
    rank_column: Name = "rank"
    query_id_column: Name | None = None
    passage_id_column: Name | None = None
    text_columns: Names = ()
    list_columns: Names = ()
    delimiter: Name | None = None
    max_field_mib: MaxFieldMib | None = None
    limit: Positive | None = None
    shard: tuple[Positive, Positive] | None = None
    rows_per_part: Positive | None = None
    reuse: Name | None = None
    models: Names = ()
    mean: Literal["ranks", "scores"] | None = None
    on_null: Literal["error", "fail"] = "error"
    force: bool = False
    restart: bool = False

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        run = (self.run, self.queries, self.corpus)
        if any(run) and not all(run):
            raise ValueError("--run, --queries and --corpus belong together")
        of_run = {"--depth": self.depth, "--qrels": self.qrels, "--with-texts": self.with_texts}
        if not all(run) and (option := next((option for option, value in of_run.items() if value), None)):
            raise ValueError(f"{option} is for a run: give --run, --queries and --corpus, or --dataset")
        if len(self.models) == 1 or len(set(self.models)) < len(self.models):
            raise ValueError(f"--model names each of several models once, not {', '.join(self.models)}")
        if self.mean and not self.models:
            raise ValueError("--mean is that of several models: name each with --model")
        if self.shard and self.shard[0] > self.shard[1]:
            raise ValueError(f"shard: {self.shard[0]}/{self.shard[1]} is no part of a whole, such as 3/8")
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without fields that runners of the release before do not know, where they are not set."""
        found: dict[str, Any] = write(self)
        added = {"models", "mean", "max_field_mib"}
        return {name: value for name, value in found.items() if value or name not in added}

    @property
    def relative_path(self) -> str | None:
        """A path that is not absolute, if there is one."""
        given = [
            *self.inputs, *self.queries, *self.corpus, self.run, self.qrels, self.reuse, self.output
        ]  # fmt: skip
        return next((path for path in given if path and not _is_absolute(path)), None)

    def at_home(self) -> FileRequest:
        """The same request with absolute paths, for runners, which run in other folders.

        Raises
        ------
        InputError
            It has no input or no output, or reads standard input.
        """
        if not self.output:
            raise InputError("name the output of a submitted run: with -o, or output=")
        if STANDARD_INPUT in self.inputs:
            raise InputError("standard input (-) cannot be submitted; give files that runners see as well")
        if bool(self.inputs) == bool(self.run):
            raise InputError(
                "give either INPUT files of pairs, or --run with --queries and --corpus, or --dataset"
            )
        changes: dict[str, object] = {"output": _absolute(self.output)}
        for name in ("inputs", "queries", "corpus"):
            changes[name] = tuple(_absolute(path) for path in getattr(self, name))
        for name in ("run", "qrels", "reuse"):
            given = getattr(self, name)
            changes[name] = given and _absolute(given)
        changes["models"] = tuple(_model_at_home(model) for model in self.models)
        return self.model_copy(update=changes)


def _is_absolute(path: str) -> bool:
    """Whether a path, which may be a glob, a URL or a dataset, is the same in all folders."""
    return "://" in path or path.startswith(DATASET) or os.path.isabs(path)  # noqa: PTH117


def _model_at_home(model: str) -> str:
    """A model's directory by its absolute path; other models by their name."""
    is_name = "/" not in model and (model == "demo" or "@" in model)
    return model if is_name or not os.path.isdir(model) else _absolute(model)  # noqa: PTH112


def _absolute(path: str) -> str:
    return path if _is_absolute(path) else os.path.abspath(path)  # noqa: PTH100 -- also of globs


NEW_ORDER_FORMAT = 4
"""Version of an order with a batch or several models, and of its run; runners that know neither leave it."""


class BatchOrder(WireModel):
    """A batch of the gateway, whose input is the request's only one, and whose answers go to its output.

    Attributes
    ----------
    endpoint
        Path of the requests that are the lines of the input; ``None``: its rows are pairs.
    owner
        Name of the API keys whose batch it is; empty without keys.
    model, asked
        Model and other fields of the spec that all lines ask for, as they name them.
    default
        The model of lines that name none.
    """

    id: Name
    owner: str
    endpoint: Name | None = None
    model: Name | None = None
    default: Name | None = None
    asked: dict[str, str | int | None] = Field(default_factory=dict)


class FileOrder(WireModel):
    """All that a runner needs: the request, the model, the chunks' queue, and who is told of the end.

    It is the one argument of the RQ job ``jobs.score_file``. ``chunk_size``, ``queue`` and ``webhook`` may be
    left out: the runner's settings then say the first two. ``batch`` is there if the gateway has asked.
    """

    added = frozenset({*FileRequest.model_fields, "queue", "chunk_size", "webhook", "batch"})
    formats = frozenset({FORMAT, NEW_ORDER_FORMAT})

    request: FileRequest
    spec: ScoreSpec
    queue: Name | None = None
    chunk_size: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_CHUNK_ROWS)] | None = None
    webhook: Annotated[str, Field(max_length=2000, pattern=r"^https?://[^\s]+$")] | None = None
    batch: BatchOrder | None = None

    @field_serializer("spec")
    def _spec_written(self, spec: ScoreSpec) -> dict[str, Any]:
        return spec.written()

    @property
    def format(self) -> int:
        """The version that its text and that of its run have."""
        return NEW_ORDER_FORMAT if self.batch or self.request.models else FORMAT

    def arguments(self) -> tuple[dict[str, object]]:
        """The arguments of the RQ job."""
        return ({"format": self.format, **self.model_dump(mode="json", exclude_none=True)},)
