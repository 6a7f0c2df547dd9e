"""Carries out a batch in a runner: scores its rows as score-file does, and writes the output and the errors.

Each step leaves a complete file in the batch's folder, or leaves nothing. If a runner dies, the next runner
takes only the steps whose files are missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.extensions.batches.lines import BatchRequest, answer, failure, read_requests
from rankmill.extensions.batches.order import BatchOrder, with_fields
from rankmill.extensions.batches.records import (
    BatchCounts,
    BatchStore,
    FileRecord,
    errors_id,
    new_batch_id,
    output_id,
)
from rankmill.extensions.gateway.refusals import WrongFile, row_reason, told, unscorable
from rankmill.extensions.runners.orders import Keep, Score
from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.contract.file_run import RunOutcome
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.files.formats.table import open_reader
from rankmill.producer.files.sink import ScoredFile
from rankmill.producer.files.stores.output_record import record_of
from rankmill.producer.files.stores.paths import AnyPath, as_path, resolved
from rankmill.producer.files.stores.reading import open_bytes
from rankmill.producer.files.stores.writing import clear_unfinished, delete, put, sync, whole_file
from rankmill.producer.files.workspace import OutputFile, clear_workspace

_ROWS = 16_384
_CHARS = 64 << 20
"""A row group of a batch's pairs has at most about this many characters. Without this bound, a query that is
repeated with each of its passages could need more than the 2 GiB that Arrow's columns of text have.
"""

_PAIRS = pa.schema([("query", pa.string()), ("passage", pa.string())])
_ALONE = {"texts": "text", "conversations": "messages"}
"""The column with the rows of a batch that has texts or conversations in place of pairs. The key is the value
of the spec's field ``inputs``.
"""

_TOKENS = "tokens"


class BatchWork:
    """Carries out one batch.

    Parameters
    ----------
    run
        The submitted run that carries out the batch; its `FileOrder` describes the batch.
    store
        The store for the records of the batch's files.
    score, keep
        The runner's functions that score files and record an outcome.
    """

    def __init__(self, run: FileRun, store: BatchStore, score: Score, keep: Keep) -> None:
        assert run.order.request.output
        self._run = run
        self._batch = BatchOrder.of(run.order)
        self._request = run.order.request
        self._output = as_path(run.order.request.output)
        self._outcome: RunOutcome | None = run.outcome
        self._store = store
        self._score = score
        self._keep = keep

    def do(self) -> None:
        """Score the batch's input file, and write the files with its answers and its errors.

        Raises
        ------
        WrongFile
            A line is not a request, or asks for another model or other options than the first line, or the
            file has changed since its rows were read.
        """
        if self._batch.endpoint is None:
            self._score(self._request, self._keep_scored)
            return
        pairs, scored = _steps(self._output)

        def is_scored() -> bool:
            return self._run.outcome is not None and scored.exists()

        if not is_scored():
            self._write_pairs(pairs, self._batch.endpoint)
            column = self._schema.names[0]
            alone = {"text": {"text_column": column}, "messages": {"messages_column": (column,)}}
            given = {"inputs": (str(pairs),), "output": str(scored), "force": True}
            wanted = self._request.model_copy(update=given | alone.get(column, {}))
            self._score(wanted, self._note_scored, _TOKENS, is_scored)
        self._write_answers(scored, self._batch.endpoint)

    def _keep_scored(self, output: ScoredFile | None, outcome: RunOutcome) -> None:
        assert output
        rows, failed = outcome.rows, outcome.row_errors
        self._store.count(self._batch.id, BatchCounts(total=rows, completed=rows - failed, failed=failed))
        self._record(output_id(self._batch.id), output.partial, output.path)
        if failed:
            _write_for_callers(output.partial_errors)
            self._record(errors_id(self._batch.id), output.partial_errors, output.errors_path)
        self._keep(outcome, output.partial, output.path)

    def _note_scored(self, output: ScoredFile | None, outcome: RunOutcome) -> None:
        """Record that all rows of the batch's requests are scored. The batch's answers are written later."""
        self._outcome = outcome
        self._keep(outcome)

    @property
    def _schema(self) -> pa.Schema:
        column = _ALONE.get(str(self._batch.asked.get("inputs")))
        return pa.schema([(column, pa.string())]) if column else _PAIRS

    def _write_pairs(self, target: AnyPath, endpoint: str) -> None:
        if target.exists():
            return
        lines = 0
        with whole_file(target) as partial:
            with pq.ParquetWriter(partial, self._schema, write_page_checksum=True) as writer:
                rows: list[tuple[str, ...]] = []
                chars = 0
                for request in read_requests(self._input, endpoint):
                    self._check(request)
                    lines += 1
                    for row in request.rows:
                        rows.append(row)
                        chars += sum(map(len, row))
                        if len(rows) >= _ROWS or chars >= _CHARS:
                            writer.write_batch(_batch(rows, self._schema))
                            rows, chars = [], 0
                writer.write_batch(_batch(rows, self._schema))
            self._store.count(self._batch.id, BatchCounts(total=lines))

    def _check(self, request: BatchRequest) -> None:
        if request.asked is None:
            return
        line, model = f"line {request.number}", request.asked.model or self._batch.default
        if model != self._batch.model:
            asks = f"asks for the model {model}, and the first line for {self._batch.model}"
            raise WrongFile(f"{line}: {asks}: a batch has one model")
        if request.asked.spec != self._batch.asked:
            raise WrongFile(f"{line}: its options are not those of the first line, which all share")

    def _write_answers(self, scored: AnyPath, endpoint: str) -> None:
        errors_path = self._output.with_name("errors.jsonl")
        with whole_file(self._output) as partial:
            partial_errors = partial.with_name(errors_path.name)
            with partial.open("wb") as answers, partial_errors.open("wb") as errors:
                done = self._write_lines(scored, endpoint, answers, errors)
            self._store.count(self._batch.id, done)
            if done.failed:
                self._record(errors_id(self._batch.id), partial_errors, errors_path)
                sync(partial_errors)
                put(partial_errors, errors_path)
            self._record(output_id(self._batch.id), partial, self._output)
            assert self._outcome
            outcome = self._outcome.model_copy(update={"output": str(self._output)})
            self._keep(outcome, partial, self._output)

    def _write_lines(
        self, scored: AnyPath, endpoint: str, answers: IO[bytes], errors: IO[bytes]
    ) -> BatchCounts:
        completed = failed = 0
        labels = _labels(scored)
        for request, scores, tokens in self._scored(scored, endpoint):
            if request.refusal:
                failed += 1
                errors.write(failure(request, self._batch.id).encode())
            else:
                completed += 1
                model = self._batch.model or self._run.order.spec.model
                line = answer(request, self._batch.id, model, scores, self._run.created, labels, tokens)
                answers.write(line.encode())
        return BatchCounts(total=completed + failed, completed=completed, failed=failed)

    def _scored(self, scored: AnyPath, endpoint: str) -> Iterator[tuple[BatchRequest, list[object], int]]:
        """Yield each request with the scores and the number of tokens of its rows. A request with an unscored
        row has a refusal.
        """
        reasons = _reasons(_errors_of(scored))
        changed = WrongFile("the file of the batch has changed since its pairs were taken; make a new batch")
        row, results = 0, _scores(scored)
        for request in read_requests(self._input, endpoint):
            scores: list[object] = []
            tokens = 0
            refused = request
            for place in range(len(request.rows)):
                if (result := next(results, None)) is None:
                    raise changed
                score, tokens_of_row = result
                tokens += tokens_of_row or 0
                if score is None and refused.refusal is None:
                    refusal = unscorable(place, reasons.get(row, "no reason is known"))
                    refused = replace(request, refusal=refusal)
                scores.append(float("nan") if score is None else score)
                row += 1
            yield refused, scores, tokens
        if next(results, None) is not None:
            raise changed

    def _record(self, file_id: str, partial: Path, path: AnyPath) -> None:
        batch, now = self._batch, system.now()
        file = FileRecord(
            id=file_id, owner=batch.owner, name=f"{batch.id}_{path.name}", place=f"{batch.id}/{path.name}",
            bytes=partial.stat().st_size, created=now, expires=now + batch.kept, purpose="batch_output",
        )  # fmt: skip
        self._store.add(file)

    @property
    def _input(self) -> AnyPath:
        return as_path(self._request.inputs[0])


class BatchOrders:
    """Lets runners carry out batches, by an entry point of ``rankmill.orders``."""

    def check(self, run: FileRun) -> None:
        """Raise `InputError` unless the batch's id and the output's folder belong to the run."""
        output = as_path(run.order.request.output or "")
        folder = resolved(output.parent)  # a link could lead to a folder with files of others
        if not BatchOrder.of(run.order).id == new_batch_id(run.id) == folder.name:
            raise InputError(f"{output}: a batch's output is in a folder that is called for its run")

    def carry_out(self, run: FileRun, settings: Settings, score: Score, keep: Keep) -> None:
        with closing(client_for(settings.redis_url or "", settings.redis_wait_seconds)) as client:
            BatchWork(run, BatchStore(client, settings.of(RunnerSettings).file_run_ttl), score, keep).do()

    def why_failed(self, error: Exception, order: FileOrder) -> str:
        """Explain to the caller why a batch failed. Words such as "the file" replace paths, which callers do
        not know.
        """
        request = order.request
        names = dict.fromkeys(request.inputs, "the file") | {request.output or "": "the output"}
        if order.spec.model.startswith("/"):
            names[order.spec.model] = Path(order.spec.model).name
        return with_fields(told(error, names))

    def place(self, order: FileOrder) -> OutputFile | None:
        """If the batch's input file has requests, return the file with their scored rows. If the input file
        has rows, return ``None``, because the batch's output itself has the scores.
        """
        of_pairs = BatchOrder.of(order).endpoint is None
        return None if of_pairs else _scored_place(as_path(order.request.output or ""))

    def clear(self, order: FileOrder) -> None:
        output = as_path(order.request.output or "")
        pairs, scored = _steps(output)
        clear_workspace(_scored_place(output))
        clear_unfinished(output.parent)
        delete((pairs, scored, _errors_of(scored), record_of(scored)), output.parent)


BATCHES = BatchOrders()


def _write_for_callers(errors: Path) -> None:
    """Rewrite a batch's file of row errors without the details about workers that callers must not see."""
    shown = errors.with_name("errors-for-callers.jsonl")
    with errors.open(encoding="utf-8") as lines, shown.open("w", encoding="utf-8") as file:
        for error in map(json.loads, lines):
            row = {"row": error["row"], "error": row_reason(error["error"]), "attempts": error["attempts"]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    sync(shown)
    shown.replace(errors)


def _scored_place(output: AnyPath) -> OutputFile:
    return OutputFile(_steps(output)[1])


def _steps(output: AnyPath) -> tuple[AnyPath, AnyPath]:
    """Return the paths of a batch's two intermediate files: the rows of its requests, and these rows with
    scores.
    """
    return output.with_name("pairs.parquet"), output.with_name("scored.parquet")


def _labels(scored: AnyPath) -> tuple[str, ...]:
    """Return the names of the labels in a file of scored rows; empty if each row has a single score."""
    every = open_reader(scored).shown_columns().names
    names = [name for name in every if name not in {*_PAIRS.names, *_ALONE.values(), _TOKENS}]
    return () if names == ["score"] else tuple(name.removeprefix("score_") for name in names)


def _scores(scored: AnyPath) -> Iterator[tuple[object, int | None]]:
    """Yield the score and the number of tokens of each row in a file of scored rows.

    If the file has labels, a score is a list with a number for each label. The score is ``None`` for a row
    that could not be scored.
    """
    labels = _labels(scored)
    names = [f"score_{label}" for label in labels] or ["score"]
    reader = open_reader(scored)
    schema = reader.shown_columns()
    for batch in reader.batches(pa.schema([schema.field(name) for name in [*names, _TOKENS]]), _ROWS):
        rows = zip(*(batch[name].to_pylist() for name in names), strict=True)
        for row, tokens in zip(rows, batch[_TOKENS].to_pylist(), strict=True):
            yield (None if row[0] is None else list(row) if labels else row[0]), tokens


def _reasons(errors: AnyPath) -> dict[int, str]:
    if not errors.exists():
        return {}
    with open_bytes(errors) as file:
        entries = [json.loads(line) for line in file]
    return {int(entry["row"]): str(entry["error"]) for entry in entries}


def _errors_of(scored: AnyPath) -> AnyPath:
    return scored.with_name(f"{scored.name}.errors.jsonl")


def _batch(rows: list[tuple[str, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=schema)
