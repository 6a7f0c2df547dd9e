"""What score-file is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.submitted.request import DATASET, STANDARD_INPUT, FileRequest
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.corpus.datasets import DatasetPart, source_path
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.formats.table import stem
from rankmill.producer.files.inputs import InputFile, RankingFiles, find_files
from rankmill.producer.files.manifest import fingerprint
from rankmill.producer.files.mean_scores import Mean
from rankmill.producer.files.outputs import (
    OutputFormat,
    OutputPart,
    check_folder,
    check_target,
)
from rankmill.producer.files.shards import check_shard
from rankmill.producer.files.source import Shard
from rankmill.producer.files.stores.paths import as_path, is_url, resolved
from rankmill.producer.files.workspace import OutputFile, PartsFolder

TEXTS = ("query", "passage")
"""Columns of a run with its queries and corpus that are in the output only if they are asked for."""


@dataclass(frozen=True)
class RunRequest:
    """A run to score, its queries and its corpus; ``depth`` as of `RankingFiles`."""

    run: str
    queries: Sequence[str]
    corpus: Sequence[str]
    depth: int | None = None
    with_texts: bool = False
    qrels: str | None = None

    def files(self) -> RankingFiles:
        """Find the files.

        Raises
        ------
        InputError
            One is not there.
        """
        run = _one_file("--run", self.run, "scoreddocs")
        qrels = _one_file("--qrels", self.qrels, "qrels") if self.qrels else None
        queries = find_files([str(source_path(name, "queries")) for name in self.queries])
        corpus = find_files([str(source_path(name, "docs")) for name in self.corpus])
        return RankingFiles(run, queries, corpus, self.depth, qrels)


def _one_file(option: str, name: str, part: DatasetPart) -> InputFile:
    path = source_path(name, part)
    if not path.is_file():
        raise InputError(f"{name}: no such file ({option})")
    return InputFile(path)


@dataclass(frozen=True)
class Request:
    """Options of the command line that are not settings."""

    inputs: Sequence[str]
    output: str | None
    columns: TextColumns
    score_column: str
    text_columns: Sequence[str]
    allow_nulls: bool
    force: bool
    restart: bool
    quiet: bool
    form: OutputFormat = field(default_factory=OutputFormat)
    delimiter: str | None = None
    max_field_mib: int | None = None
    list_columns: Sequence[str] = ()
    limit: int | None = None
    run: RunRequest | None = None
    shard: Shard | None = None
    rows_per_part: int | None = None
    reuse: str | None = None
    models: Sequence[str] = ()
    mean: Mean | None = None

    @classmethod
    def of(cls, asked: FileRequest, *, quiet: bool = False) -> Request:
        """What is asked for by the names of score-file's options."""
        form = OutputFormat(
            asked.output_format,
            asked.top_k,
            asked.rank_column,
            asked.query_id_column,
            asked.passage_id_column,
            asked.tag,
        )
        run = asked.run and RunRequest(
            asked.run, asked.queries, asked.corpus, asked.depth, asked.with_texts, asked.qrels
        )
        return cls(
            inputs=asked.inputs,
            output=asked.output,
            columns=TextColumns(asked.query_column, asked.passage_column),
            score_column=asked.score_column,
            text_columns=asked.text_columns,
            allow_nulls=asked.on_null == "error",
            force=asked.force,
            restart=asked.restart,
            quiet=quiet,
            form=form,
            delimiter=asked.delimiter,
            max_field_mib=asked.max_field_mib,
            list_columns=asked.list_columns,
            limit=asked.limit,
            run=run or None,
            shard=asked.shard,
            rows_per_part=asked.rows_per_part,
            reuse=asked.reuse,
            models=asked.models,
            mean=asked.mean,
        )

    @property
    def texts(self) -> TextColumns:
        """The columns with the texts, of a run or of files of pairs."""
        return TextColumns(*TEXTS) if self.run else self.columns

    def named_columns(self) -> dict[str, str]:
        """Metadata of the output that says which texts were scored, and where the scores are."""
        names = {**dict(zip(TEXTS, self.texts.names, strict=True)), "score": self.score_column}
        return {f"rankmill.{what}_column": name for what, name in names.items()}

    @property
    def reads_stdin(self) -> bool:
        """Whether the input is standard input.

        Raises
        ------
        InputError
            It is one of several inputs.
        """
        if STANDARD_INPUT in self.inputs and len(self.inputs) > 1:
            raise InputError("standard input (-) must be the only input")
        return STANDARD_INPUT in self.inputs

    def target(self, files: Sequence[InputFile]) -> Path:
        """The requested output, else ``<input stem>.scored.parquet`` beside the input.

        With `rows_per_part` it is a folder, by default ``<input stem>.scored``.
        """
        if self.output:
            path = as_path(self.output)
            return resolved(path) if self.rows_per_part else path
        if any(is_url(name) for name in (*self.inputs, *([self.run.run] if self.run else []))):
            raise InputError("the input is in an object store; name the output with -o")
        if self.run and self.run.run.startswith(DATASET):
            raise InputError("the run is a dataset's; name the output with -o")
        ending = "" if self.rows_per_part else self.form.ending
        if self.shard:
            raise InputError("--shard makes one output of several; name it with -o")
        if self.run:
            path = resolved(Path(self.run.run))
            return path.with_name(f"{stem(path)}.scored{ending}")
        if self.reads_stdin:
            raise InputError("standard input (-) has no name; name the output with -o")
        if len(self.inputs) > 1 or (len(files) > 1 and not Path(self.inputs[0]).is_dir()):
            raise InputError("several inputs make one output; name it with -o")
        whole = Path(self.inputs[0])
        name = resolved(whole).name if whole.is_dir() else stem(files[0].path)
        folder = resolved(whole if whole.is_dir() else files[0].path).parent
        return folder / f"{name}.scored{ending}"

    def file_at(self, target: Path) -> Path:
        """The output's file, or that of its only part: its name says the format."""
        return target / self.form.part_name(OutputPart(1, 1)) if self.rows_per_part else target

    def place(self, target: Path) -> OutputFile:
        """What is at the place of the output."""
        return PartsFolder(target) if self.rows_per_part else OutputFile(target)

    def check(self, target: Path) -> None:
        """Check that the output can be written at `target`; raises `InputError` if not."""
        file = self.file_at(target)
        if self.rows_per_part:
            check_folder(target)
            if self.form.ranks(file):
                raise InputError(
                    "--rows-per-part keeps the rows in the input's order; leave it out, or the ranking"
                )
        else:
            check_target(target, self.form)
        if self.shard:
            check_shard(file, self.form)
        if self.run and self.run.qrels and self.form.ranks(file):
            raise InputError(
                f"{target}: --qrels adds passages that are not in the run, so its output is not ranked; "
                "leave out --qrels, or the ranking"
            )

    def check_scores(self, target: Path, settings: Settings) -> None:
        """Check that rows have one score where one is needed; raises `InputError` if not."""
        if not settings.all_labels and not self.models:
            return
        ranks = self.form.ranks(self.file_at(target))
        if self.models and settings.all_labels:
            raise InputError("--all-labels is for one model; of several, each has one score")
        if settings.all_labels and ranks:
            raise InputError("--all-labels makes several scores, and rows are ranked by one: use --label")
        if self.models and ranks and self.mean != "scores":
            raise InputError(
                "several models (--model) make several scores, and rows are ranked by one: --mean scores"
            )
        if self.reuse:
            raise InputError("--reuse takes one score of a row: leave it out, or name one model and label")
        if self.models and self.rows_per_part:
            raise InputError("--rows-per-part is for one model: leave it out, or score with each alone")
        if self.mean and self.shard:
            raise InputError("--mean is over all passages of a query, and a shard may have some of them")

    def options(self, settings: Settings) -> dict[str, object]:
        """Options that change the rows of the output, by their names on the command line."""
        form, usual = self.form, OutputFormat()
        return {
            **settings.spec().written(),
            "model": ", ".join(self.models or [settings.model]),
            "query_column": self.columns.query,
            "passage_column": self.columns.passage,
            "score_column": self.score_column,
            "on_null": "error" if self.allow_nulls else "fail",
            **({"text_columns": ", ".join(sorted(self.text_columns))} if self.text_columns else {}),
            **_given("top_k", form.top_k, usual.top_k),
            **_given("rank_column", form.rank_column, usual.rank_column),
            **_given("output_format", form.kind, usual.kind),
            **_given("query_id_column", form.query_id, usual.query_id),
            **_given("passage_id_column", form.passage_id, usual.passage_id),
            **_given("tag", form.tag, usual.tag),
            **_given("delimiter", self.delimiter, None),
            **_given("list_columns", ",".join(self.list_columns), ""),
            **_given("limit", self.limit, None),
            **_given("shard", self.shard and "{}/{}".format(*self.shard), None),
            **_given("rows_per_part", self.rows_per_part, None),
            **_given("mean", self.mean, None),
            **_given("reuse", self.reuse and _state(self.reuse), None),
            **_given("depth", self.run and self.run.depth, None),
            **_given("with_texts", bool(self.run and self.run.with_texts), False),
        }


def _state(name: str) -> str:
    """A file, and a text that changes when it does."""
    path = as_path(name)
    return f"{resolved(path)}, {fingerprint(path)}"


def _given(name: str, value: object, usual: object) -> dict[str, object]:
    """The option, if it is not as usual."""
    return {} if value == usual else {name: value}
