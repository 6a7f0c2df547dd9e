"""Determines the place, format and columns of score-file's output, and refuses options without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import DATASET, STANDARD_STREAM, FileRequest
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.formats.delimited import CSV, TSV
from rankmill.producer.files.formats.table import stem
from rankmill.producer.files.formats.trec import TREC
from rankmill.producer.files.inputs import InputFile
from rankmill.producer.files.outputs import OutputFormat, check_target, is_part
from rankmill.producer.files.plan import OutputPlan, plan_output
from rankmill.producer.files.ranking import MeanColumn
from rankmill.producer.files.shards import check_shard
from rankmill.producer.files.source import PairSource
from rankmill.producer.files.stores.paths import AnyPath, as_path, is_url, resolved
from rankmill.producer.files.stores.places import check_folder
from rankmill.producer.files.stores.reading import fingerprint
from rankmill.producer.files.workspace import OutputFile, PartsFolder
from rankmill.score.input import RUN_TEXTS, FoundInput, text_columns

_ALWAYS = ("query_column", "passage_column", "score_column", "on_null")
"""Names of the options that are written into an output's manifest even if they have their defaults. The
manifest lists what the rows of the output depend on: an interrupted run is continued only if the manifest is
unchanged.
"""

_OF_THE_PLACE = {
    "inputs", "run", "queries", "corpus", "qrels", "output", "models", "force", "restart",
}  # fmt: skip
"""Names of the options that are not written into an output's manifest under their own names:

- options that do not change the rows of the output, such as ``force``;
- ``models``, which the manifest has as ``model``, and options that name input files, for which the manifest
  has an entry for each file.
"""


@dataclass(frozen=True)
class OutputTarget:
    """The place and format of a request's output, which is a file, or with ``rows_per_part`` a folder."""

    request: FileRequest
    path: AnyPath

    @property
    def form(self) -> OutputFormat:
        request = self.request
        return OutputFormat(
            request.output_format,
            request.top_k,
            request.rank_column,
            request.query_id_column,
            request.passage_id_column,
            request.tag,
        )

    @property
    def file(self) -> AnyPath:
        """The output file, or the first part in an output folder. Its ending tells the output's format."""
        if not self.request.rows_per_part:
            return self.path
        return self.path / self.form.part_name(1, 1)

    @property
    def is_ranked(self) -> bool:
        return self.form.ranks(self.file)

    def place(self) -> OutputFile:
        return PartsFolder(self.path) if self.request.rows_per_part else OutputFile(self.path)

    def check(self, files: Sequence[InputFile], settings: Settings) -> None:
        """Check that the output can be written, and that the request's options agree with it; raises
        `InputError` if not. `files` are the input, which must not be replaced.
        """
        request = self.request
        if request.rows_per_part:
            check_folder(self.path)
            if self.is_ranked:
                raise InputError(
                    "--rows-per-part keeps the rows in the input's order; leave out the option or the ranking"
                )
        else:
            check_target(self.path, self.form)
        if request.shard:
            check_shard(self.file, self.form)
        if request.qrels and self.is_ranked:
            raise InputError(
                f"{self.path}: --qrels adds passages that are not in the run, so its output is not ranked; "
                "leave out --qrels, or the ranking"
            )
        if request.kind_of_rows != "pairs":
            self._check_rows_alone()
        if settings.all_labels or request.models or len(request.messages_column) > 1:
            self._check_several_scores(all_labels=settings.all_labels)
        read = [file.path for file in files]
        folders_of_parts = [path.parent for path in read if is_part(path.name)]
        if resolved(self.path) in {resolved(path) for path in (*read, *folders_of_parts)}:
            raise InputError(f"{self.path} is the input itself; name another output with -o")

    def _check_rows_alone(self) -> None:
        request = self.request
        if (self.is_ranked or request.mean) and not request.query_id_column:
            option = "--text-column" if request.text_column else "--messages-column"
            raise InputError(
                f"--top-k, --mean and TREC runs need queries, which {option} does not name: name their "
                "column with --query-id-column, or leave these options out"
            )
        if request.messages_column and request.reuse:
            raise InputError("--reuse compares texts, not conversations: leave it out")

    def _check_several_scores(self, *, all_labels: bool) -> None:
        request = self.request
        if request.models and all_labels:
            raise InputError("--all-labels is for one model: leave it out, or name one model")
        if len(request.messages_column) > 1 and (all_labels or self.is_ranked or request.rows_per_part):
            raise InputError(
                "--messages-column CHOSEN,REJECTED makes two scores: leave out --all-labels, a ranking and "
                "--rows-per-part, or name one column"
            )
        if all_labels and self.is_ranked:
            raise InputError(
                "--all-labels makes several scores, and rows are ranked by one: name it with --label"
            )
        if request.models and self.is_ranked and request.mean != "scores":
            raise InputError(
                "several models (--model) make several scores, and rows are ranked by one: add --mean scores"
            )
        if request.reuse:
            raise InputError("--reuse takes one score of a row: leave it out, or name one model and label")
        if request.models and request.rows_per_part:
            raise InputError(
                "--rows-per-part is for one model: leave it out, or score with one model at a time"
            )
        if request.mean and request.shard:
            raise InputError(
                "--mean needs all passages of a query, and a shard may lack some: leave out --mean or --shard"
            )

    def refuse_unused(self, input_files: FoundInput) -> None:
        """Raise `InputError` if an option of the request has no effect with this input and output."""
        for name, why in [*self._unused_by_input(input_files), *self._unused_by_output()]:
            if self.request.is_given(name):
                raise InputError(f"--{name.replace('_', '-')} has no effect here: {why}; leave it out")

    def _unused_by_input(self, input_files: FoundInput) -> Iterator[tuple[str, str]]:
        if input_files.run:
            of_pairs = ("query_column", "passage_column", "text_columns", "list_columns", "delimiter")
            yield from ((name, "it is for files of pairs, not for a run") for name in of_pairs)
            if not any(file.format in (CSV, TSV) for file in input_files.run.corpus):
                yield "columns", "no file of the corpus is CSV or TSV"
        elif not any(file.format in (CSV, TSV) for file in input_files.files):
            yield from ((name, "no file of the input is CSV or TSV") for name in ("delimiter", "columns"))
        elif all(file.format in (CSV, TSV) for file in input_files.files):
            yield "text_columns", "all columns of CSV and TSV are text"

    def _unused_by_output(self) -> Iterator[tuple[str, str]]:
        request, is_trec = self.request, self.form.of(self.file) is TREC
        if is_trec:
            if not request.reuse:
                yield "score_column", "a TREC run has no names of columns"
            yield "with_texts", "a TREC run has no texts"
        else:
            yield "tag", "only a TREC run has a name"
            yield "passage_id_column", "only a TREC run needs ids of passages"
        if not self.is_ranked and not request.mean:
            yield "query_id_column", "it is for --top-k, --mean and TREC runs"
        if (is_trec or not self.is_ranked) and request.mean != "ranks":
            yield "rank_column", "the output has no column of ranks"

    def plan(
        self, source: PairSource, columns: Sequence[str], tokens_column: str | None = None
    ) -> OutputPlan:
        """Plan the columns and the order of the output's rows. `columns` are the names of the columns with
        scores, and `tokens_column` names a column with each row's number of tokens.
        """
        request, mean = self.request, None
        if request.mean:
            of_ranks = request.mean == "ranks"
            name = request.rank_column if of_ranks else request.score_column.partition(",")[0]
            mean = MeanColumn(f"{name}_mean", request.mean)
        left_out = RUN_TEXTS.names if request.run and not request.with_texts else ()
        return plan_output(source, self.file, self.form, columns, left_out, mean, tokens_column)


def find_target(request: FileRequest, files: Sequence[InputFile]) -> OutputTarget:
    """Return the place of a request's output. The default for ``pairs.csv`` is ``pairs.scored.parquet``
    beside it; with ``rows_per_part`` it is the folder ``pairs.scored``.

    Raises
    ------
    InputError
        The request does not name the output, and there is no default for its input, such as several files.
    """
    if request.output:
        path = as_path(request.output)
        return OutputTarget(request, resolved(path) if request.rows_per_part else path)
    name = request.run or (request.inputs[0] if len(request.inputs) == 1 else STANDARD_STREAM)
    is_elsewhere = name == STANDARD_STREAM or is_url(name) or name.startswith(DATASET)
    if is_elsewhere or request.shard or not (request.run or len(files) == 1 or as_path(name).is_dir()):
        raise InputError("this output has no default: name it with -o")
    source = as_path(name)
    folder = source.is_dir()
    source = source if request.run or folder else files[0].path  # the request may name the file by a glob
    ending = "" if request.rows_per_part else OutputFormat(request.output_format).ending
    named = resolved(source).name if folder else stem(source)
    return OutputTarget(request, resolved(source).parent / f"{named}.scored{ending}")


def named_columns(request: FileRequest) -> dict[str, str]:
    """Return metadata that name the output's columns of texts and scores: ``{"rankmill.query_column":
    "question", …}``.
    """
    texts = text_columns(request)
    sides = {"texts": ["text"], "conversations": ["messages"]}.get(texts.inputs, ["query", "passage"])
    names = {"score": request.score_column, **dict(zip(sides, texts.names, strict=False))}
    return {f"rankmill.{role}_column": name for role, name in names.items()}


def row_options(request: FileRequest, settings: Settings) -> dict[str, object]:
    """Return the options and settings on which the output's rows depend, by name, for the output's
    manifest.
    """
    named = [name for name in FileRequest.model_fields if name not in _OF_THE_PLACE]
    given = {name: getattr(request, name) for name in named if name in _ALWAYS or request.is_given(name)}
    own = {name: _written(name, value) for name, value in given.items()}
    spec = settings.spec().model_dump(exclude={"inputs"})
    return {**spec, "model": ", ".join(request.models or [settings.model]), **own}


def _written(name: str, value: object) -> object:
    """Return the value of an option as an output's manifest has it."""
    if name == "reuse":
        path = as_path(str(value))
        return f"{resolved(path)}, {fingerprint(path)}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else value
