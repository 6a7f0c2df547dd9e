"""Opening the input of score-file: files of pairs, standard input, or a run with its queries and corpus."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import ReadOptions
from rankmill.producer.files.inputs import (
    InputFile,
    RankingFiles,
    find_files,
    forget_stdin,
    receive_stdin,
)
from rankmill.producer.files.manifest import fingerprint, named
from rankmill.producer.files.source import PairSource, open_source
from rankmill.score.request import Request


@dataclass
class Found:
    """The files of an input, found but not yet looked at."""

    request: Request
    files: tuple[InputFile, ...]
    run: RankingFiles | None
    fingerprints: Sequence[str] = ()

    def identify(self, folder: Path, stack: ExitStack) -> dict[str, str]:
        """Identify the input for the manifest; standard input is kept in `folder` until `stack` ends."""
        if self.request.reads_stdin:
            stack.callback(forget_stdin, folder)
            file, content = receive_stdin(folder)
            self.files = (file,)
            self.fingerprints = [fingerprint(file.path)]
            return {"standard input": content}
        self.fingerprints = [fingerprint(file.path) for file in self.files]
        return named(self.files, self.fingerprints)

    def open(self) -> PairSource:
        """Look at the files and check that they can be scored.

        Raises
        ------
        InputError
            They cannot.
        """
        request = self.request
        if self.run:
            from rankmill.producer.files.corpus.ranking_source import (
                RankingSource,  # pandas, which is slow to import
            )

            return RankingSource(
                self.run,
                self.fingerprints,
                allow_missing=request.allow_nulls,
                limit=request.limit,
                shard=request.shard,
            )
        return open_source(
            self.files,
            request.columns,
            allow_nulls=request.allow_nulls,
            as_text=request.text_columns,
            fingerprints=self.fingerprints,
            options=ReadOptions(request.delimiter, request.list_columns, request.max_field_mib),
            limit=request.limit,
            shard=request.shard,
        )


def find_input(request: Request) -> Found:
    """Find the files of the request's input; standard input has none yet.

    Raises
    ------
    InputError
        A file is not there, or the request names no input or two.
    """
    if request.run:
        if request.inputs:
            raise InputError(
                "give either INPUT files of pairs or --run with --queries and --corpus, or --dataset"
            )
        run = request.run.files()
        return Found(request, run.all, run)
    if not request.inputs:
        raise InputError("no INPUT: give files of pairs, or --run with --queries and --corpus")
    files = () if request.reads_stdin else find_files(request.inputs, request.output)
    return Found(request, files, None)
