"""Options that would do nothing with this input and this output: they are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.submitted.request import FileRequest
from rankmill.producer.files.formats.table import CSV, TREC, TSV
from rankmill.producer.files.inputs import InputFile
from rankmill.score.request import Request


def refuse_unused(request: Request, files: Sequence[InputFile], target: Path) -> None:
    """Raise `InputError` if an option of the request has no effect on what is made of `files` at `target`."""
    for option, why in [*_of_input(request, files), *_of_output(request, target)]:
        raise InputError(f"{option} has no effect here: {why}; leave it out")


def _of_input(request: Request, files: Sequence[InputFile]) -> Iterator[tuple[str, str]]:
    """Options that say how files of pairs are read, and why they do nothing."""
    given = {
        "--query-column": request.columns.query != _usual("query_column"),
        "--passage-column": request.columns.passage != _usual("passage_column"),
        "--text-columns": bool(request.text_columns),
        "--list-columns": bool(request.list_columns),
        "--delimiter": request.delimiter is not None,
        "--max-field-mib": request.max_field_mib is not None,
    }
    if request.run:
        yield from ((option, "it is for files of pairs, not for a run") for option in given if given[option])
    elif not any(file.format in (CSV, TSV) for file in files):
        why = "no file of the input is CSV or TSV"
        yield from ((option, why) for option in ("--delimiter", "--max-field-mib") if given[option])


def _of_output(request: Request, target: Path) -> Iterator[tuple[str, str]]:
    """Options that say what the output looks like, and why they do nothing."""
    form, file = request.form, request.file_at(target)
    is_trec, is_ranked = form.of(file) is TREC, form.ranks(file)
    if is_trec:
        if request.score_column != _usual("score_column") and not request.reuse:
            yield "--score-column", "a TREC run has no names of columns"
        if request.run and request.run.with_texts:
            yield "--with-texts", "a TREC run has no texts"
    elif form.tag != _usual("tag"):
        yield "--tag", "only a TREC run has a name"
    if not is_trec and form.passage_id is not None:
        yield "--passage-id-column", "only a TREC run needs ids of passages"
    if not is_ranked and not request.mean and form.query_id is not None:
        yield "--query-id-column", "it is for --top-k, --mean and TREC runs"
    if form.rank_column != _usual("rank_column") and (is_trec or not is_ranked) and request.mean != "ranks":
        yield "--rank-column", "the output has no column of ranks"


def _usual(name: str) -> object:
    return FileRequest.model_fields[name].default
