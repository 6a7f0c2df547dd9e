"""``-o -``: writes the output to standard output when it is complete."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankmill.cli.options import NewTable
from rankmill.cli.show import echo
from rankmill.jobs.cache import temporary_folder
from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.jobs.contract.file_request import STANDARD_STREAM, FileRequest
from rankmill.producer.files.stores.paths import AnyPath

if TYPE_CHECKING:
    from rankmill.producer.files.formats.base import Format
    from rankmill.producer.files.outputs import OutputFormat
    from rankmill.score.summary import Summary

_SHOWN_ERRORS = 10

_NOTE = "-o - keeps no scores: only with a file (-o FILE) the same command continues"


@contextmanager
def in_temporary_folder(request: FileRequest) -> Iterator[FileRequest]:
    """Yield a copy of the request that writes to a temporary file; `pass_on` copies the file to standard
    output.

    The file is deleted after the block, even if the command fails. A later command could not continue from
    the file: the program that reads the standard output through a pipe will have ended by then.

    Raises
    ------
    UsageError
        The request does not decide the format, an option has no effect, or standard output is closed or is a
        terminal that cannot show the format.
    """
    for name in ("rows_per_part", "force", "restart"):
        if request.is_given(name):
            raise _without_effect(name)
    with _temporary_file(request.output_format or _kind_of_input(request)) as file:
        try:
            yield request.model_copy(update={"output": str(file)})
        except BaseException as error:
            if notes := getattr(error, "__notes__", []):  # a note may say that scores are kept in the folder
                error.__notes__ = [_NOTE if str(file.parent) in note else note for note in notes]
            raise


def pass_on(summary: Summary, *, quiet: bool) -> Summary:
    """Copy the output file to standard output, and report rows without a score. Returns the summary with
    standard output in place of the file.
    """
    _copy(Path(summary.output), quiet=quiet)
    return summary.model_copy(update={"output": STANDARD_STREAM, "errors_file": None})


@contextmanager
def new_table(
    asked: NewTable, source: Format | None, why: str, *, force: bool
) -> Iterator[tuple[AnyPath, OutputFormat]]:
    """Yield the path to which a command writes its rows, and the format. With ``-o -``, the path is that of a
    temporary file, which is copied to standard output at the end.

    If the rows cannot be a TREC run, `why` says why, for the error message.

    Raises
    ------
    UsageError
        With ``-o -``: the format is unknown, `force` is set, or standard output is closed or is a terminal
        that cannot show the format.
    InputError
        The file cannot be written, exists although `force` is not set, or would be a TREC run.
    """
    from rankmill.producer.files.outputs import OutputFormat

    form = OutputFormat(asked.output_format)
    if str(asked.output) != STANDARD_STREAM:
        _check(asked.output, form, f"{asked.output}: {why}")
        if asked.output.exists() and not force:
            raise InputError(
                f"{asked.output} exists already; replace it with --force or name another with -o"
            )
        yield asked.output, form
        return
    if force:
        raise _without_effect("force")
    with _temporary_file(asked.output_format or _one_kind([source])) as file:
        _check(file, form, f"{asked.output}: {why}")
        yield file, form
        _copy(file, quiet=False)


def _check(output: AnyPath, form: OutputFormat, why: str) -> None:
    from rankmill.producer.files.formats.trec import TREC
    from rankmill.producer.files.outputs import check_target

    check_target(output, form)
    if form.of(output) is TREC:
        raise InputError(f"{why}; name a .parquet, .csv, .tsv or .jsonl file, or another --output-format")


def _without_effect(option: str) -> click.UsageError:
    return click.UsageError(f"--{option.replace('_', '-')} has no effect with -o -, which is not a file")


@contextmanager
def _temporary_file(kind: str) -> Iterator[Path]:
    """Yield the path of a temporary file in the format `kind`, for standard output. The file is deleted after
    the block.

    Raises `UsageError` if standard output is closed, or is a terminal that cannot show the format.
    """
    from rankmill.producer.files.formats.table import of_ending

    form = of_ending(f".{kind}")
    if sys.stdout is None:
        raise click.UsageError("-o -: standard output is closed; name a file with -o")
    if form and not form.is_text and sys.stdout.isatty():
        raise click.UsageError(f"-o -: a terminal does not show {kind}; name another --output-format")
    with temporary_folder("rankmill-output-") as folder:
        yield folder / f"output.{kind}"


def _copy(output: Path, *, quiet: bool) -> None:
    """Copy a file to standard output, and the beginning of its list of row errors to standard error."""
    errors = output.with_name(f"{output.name}.errors.jsonl")
    if errors.exists() and not quiet:
        with errors.open() as file:
            for line in islice(file, _SHOWN_ERRORS):
                error = json.loads(line)
                echo(f"row {error['row']} (counted from 0) has no score: {error['error']}", err=True)
    try:
        with output.open("rb") as data:
            shutil.copyfileobj(data, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror}; -o can name a file") from None


def _kind_of_input(request: FileRequest) -> str:
    from rankmill.producer.files.inputs import find_files

    is_found = request.inputs and not request.reads_stdin
    return _one_kind([file.format for file in find_files(request.inputs)] if is_found else [])


def _one_kind(formats: list[Format | None]) -> str:
    """For standard output, return the name of the input's format. Raises `UsageError` if the input has
    several formats, or none.
    """
    names = {form.name for form in formats if form}
    kinds = {{"json": "jsonl", "arrows": "arrow"}.get(name, name) for name in names}
    if len(kinds) != 1:
        raise click.UsageError("-o - needs a format: --output-format jsonl, csv, tsv, parquet, arrow or trec")
    return kinds.pop()
