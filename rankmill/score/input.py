"""The input of score-file, which is files of pairs, standard input, or a run with queries and corpus."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.producer.files.corpus.datasets import DatasetPart, source_path
from rankmill.producer.files.formats.base import Format, ReadOptions, TextColumns
from rankmill.producer.files.formats.jsonl import JSON, JSONL
from rankmill.producer.files.inputs import (
    InputFile,
    RankingFiles,
    find_files,
    forget_stdin,
    receive_stdin,
)
from rankmill.producer.files.manifest import named
from rankmill.producer.files.source import PairSource, open_source
from rankmill.producer.files.stores.reading import fingerprint

RUN_TEXTS = TextColumns("query", "passage")
"""Names of the columns with the texts to score, if the request names a run (``--run``). The texts are looked
up in the queries and in the corpus, by the ids in the run. The output has these columns only if the request
asks for them.
"""


def text_columns(request: FileRequest) -> TextColumns:
    """Return the columns with the texts to score: those that the request names, or `RUN_TEXTS` for a run
    (``--run``).
    """
    if request.run:
        return RUN_TEXTS
    if request.text_column:
        return TextColumns(request.text_column, inputs="texts")
    if request.messages_column:
        first, *second = request.messages_column
        return TextColumns(first, second[0] if second else None, "conversations")
    return TextColumns(request.query_column, request.passage_column)


@dataclass
class FoundInput:
    """The input files of a request, which are found but not read yet."""

    request: FileRequest
    files: tuple[InputFile, ...]
    run: RankingFiles | None = None
    fingerprints: Sequence[str] = ()

    def identify(self, folder: Path, stack: ExitStack) -> dict[str, str]:
        """Return a fingerprint for each input file, by the file's number and path. An interrupted run is
        continued only if the files and their fingerprints are unchanged.

        If the input is standard input, save it as a file in `folder`, and delete this file when `stack` ends.
        """
        if self.request.reads_stdin:
            stack.callback(forget_stdin, folder)
            file, content = receive_stdin(folder)
            self.files = (file,)
            self.fingerprints = [fingerprint(file.path)]
            return {"standard input": content}
        self.fingerprints = [fingerprint(file.path) for file in self.files]
        return named(self.files, self.fingerprints)

    def open(self, made: Format | None = None) -> PairSource:
        """Open the input files, and check that their rows can be scored; `made` is the format of the output.

        Raises
        ------
        InputError
            The files cannot be scored.
        """
        request, allow_nulls = self.request, self.request.on_null == "error"
        if self.run:
            from rankmill.producer.files.corpus.ranking_source import (
                RankingSource,  # imported here, because pandas is slow to import
            )
            from rankmill.producer.files.corpus.texts import TextFields

            return RankingSource(
                self.run,
                self.fingerprints,
                allow_missing=allow_nulls,
                on_duplicate=request.on_duplicate,
                queries=TextFields("queries", request.queries_id, request.queries_text),
                corpus=TextFields("corpus", request.corpus_id, request.corpus_text, request.columns),
                limit=request.limit,
                shard=request.shard,
            )
        is_json = all(file.format in {JSON, JSONL} for file in self.files)
        return open_source(
            self.files,
            text_columns(request),
            allow_nulls=allow_nulls,
            as_text=request.text_columns,
            fingerprints=self.fingerprints,
            options=ReadOptions(
                request.delimiter,
                request.list_columns,
                names=request.columns,
                typed=not is_json or made is None or not made.is_text,
            ),
            limit=request.limit,
            shard=request.shard,
        )


def find_input(request: FileRequest) -> FoundInput:
    """Find the input files that `request` names. Standard input is not a file yet: `FoundInput.identify`
    saves it.

    Raises
    ------
    InputError
        A file does not exist or cannot be read. Or the request names no input, or both files and a run, or
        both files and standard input.
    """
    if request.run:
        if request.inputs:
            raise InputError(
                "give either INPUT files of pairs or --run with --queries and --corpus, or --dataset"
            )
        run = RankingFiles(
            _one_file("--run", request.run, "scoreddocs"),
            find_files([str(source_path(name, "queries")) for name in request.queries]),
            find_files([str(source_path(name, "docs")) for name in request.corpus]),
            request.depth,
            _one_file("--qrels", request.qrels, "qrels") if request.qrels else None,
        )
        return FoundInput(request, run.all, run)
    if not request.inputs:
        raise InputError("no INPUT: give files of pairs, or --run with --queries and --corpus")
    if request.reads_stdin and len(request.inputs) > 1:
        raise InputError("standard input (-) must be the only input")
    return FoundInput(request, () if request.reads_stdin else find_files(request.inputs, request.output))


def _one_file(option: str, name: str, part: DatasetPart) -> InputFile:
    path = source_path(name, part)
    if not path.is_file():
        raise InputError(f"{name}: no such file ({option})")
    return InputFile(path)
