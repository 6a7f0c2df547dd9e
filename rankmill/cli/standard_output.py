"""``-o -``: writes the output to standard output when it is complete."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rankmill.cli.show import echo
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.contract.file_request import STANDARD_STREAM, FileRequest

if TYPE_CHECKING:
    from rankmill.score.summary import Summary

_SHOWN_ERRORS = 10

_NOTE = "-o - keeps no scores: only with a file (-o FILE) the same command continues"


@contextmanager
def in_temporary_folder(request: FileRequest) -> Iterator[FileRequest]:
    """Change the request to write a file in a temporary folder instead of standard output.

    Nothing of it is kept, because the reader of a pipe cannot get the second half later.

    Raises
    ------
    UsageError
        The format is unknown, or an option has no effect.
    """
    for name in ("rows_per_part", "force", "restart"):
        if request.is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} has no effect with -o -, which is no file")
    from rankmill.producer.files.formats.table import of_ending  # late: pyarrow is slow to import

    kind = request.output_format or _kind_of_input(request)
    form = of_ending(f".{kind}")
    if form and not form.is_text and sys.stdout.isatty():
        raise click.UsageError(f"-o -: a terminal does not show {kind}; name another --output-format")
    with tempfile.TemporaryDirectory(prefix="rankmill-") as folder:
        try:
            yield request.model_copy(update={"output": str(Path(folder) / f"output.{kind}")})
        except (RankmillError, KeyboardInterrupt) as error:
            if getattr(error, "__notes__", []):  # notes about scores that are kept in the folder
                error.__notes__ = [_NOTE]
            raise


def pass_on(summary: Summary, *, quiet: bool) -> Summary:
    """Copy the output to standard output, and report rows without a score; returns its summary."""
    if summary.errors_file and not quiet:
        with Path(summary.errors_file).open() as file:
            for line in islice(file, _SHOWN_ERRORS):
                error = json.loads(line)
                echo(f"row {error['row']} (counted from 0) has no score: {error['error']}", err=True)
    with Path(summary.output).open("rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    return summary.model_copy(update={"output": STANDARD_STREAM, "errors_file": None})


def _kind_of_input(request: FileRequest) -> str:
    """The format of the input's files, if they all have the same and it can be written."""
    from rankmill.producer.files.inputs import find_files

    kinds = set()
    if request.inputs and not request.reads_stdin:
        kinds = {file.format.name for file in find_files(request.inputs) if file.format}
    kinds = {{"json": "jsonl", "arrows": "arrow"}.get(kind, kind) for kind in kinds}
    if len(kinds) != 1:
        raise click.UsageError("-o - needs a format: --output-format jsonl, csv, tsv, parquet, arrow or trec")
    return kinds.pop()
