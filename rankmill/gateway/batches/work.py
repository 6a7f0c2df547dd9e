"""A runner's work on a batch: its pairs are scored as a file is, and its answers are put where it says.

Each step leaves a file in the batch's folder as a whole, or none. A runner that follows one that has died
takes the steps that are left.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.gateway.batches.folder import beside, open_bytes, publish
from rankmill.gateway.batches.ids import errors_id, output_id
from rankmill.gateway.batches.lines import Request, answer, failure, read_requests
from rankmill.gateway.batches.records import BatchCounts, BatchStore, FileRecord
from rankmill.gateway.refusals import Refusal
from rankmill.jobs.contract.errors import InputError, RunFailed
from rankmill.jobs.protocol.submitted.record import FileRun
from rankmill.jobs.protocol.submitted.request import BatchOrder, FileRequest
from rankmill.producer.files.stores.output_record import record_of
from rankmill.producer.files.stores.paths import as_path
from rankmill.producer.files.stores.reading import open_random

_ROWS = 16_384
_PAIRS = pa.schema([("line", pa.int64()), ("query", pa.string()), ("passage", pa.string())])


@dataclass(frozen=True)
class Made:
    """A complete file, before it is moved to its place."""

    partial: Path
    path: Path


@dataclass(frozen=True)
class Tools:
    """What a runner can do.

    Attributes
    ----------
    score
        Scores files as score-file does. The function is called with the complete output, the list of rows
        without a score if there are any, the number of rows and that of those without a score, before the
        files are moved to their places.
    note
        Notes what has been scored; with a file, also that it is the run's output, which is complete. An
        exception from it keeps the file from its place.
    """

    score: Callable[[FileRequest, Callable[[Made, Made | None, int, int], None]], None]
    note: Callable[[Made | None], None]


class BatchWork:
    """The work on one batch.

    Parameters
    ----------
    run
        The run, whose order has a batch.
    store
        Where the records of its files go.
    tools
        What the runner can do.
    """

    def __init__(self, run: FileRun, store: BatchStore, tools: Tools) -> None:
        assert run.order.batch
        assert run.order.request.output
        self._run = run
        self._batch: BatchOrder = run.order.batch
        self._request = run.order.request
        self._output = as_path(run.order.request.output)
        self._store = store
        self._tools = tools

    def do(self) -> None:
        """Score the input, and make the files.

        Raises
        ------
        InputError
            A line is no request, or asks for another model than the first.
        """
        if self._batch.endpoint is None:
            self._tools.score(self._request, self._keep_scored)
            return
        pairs, scored = (self._output.with_name(f"{name}.parquet") for name in ("pairs", "scored"))
        if not (self._run.outcome and scored.exists()):
            self._write_pairs(pairs, self._batch.endpoint)
            asked = {"inputs": (str(pairs),), "output": str(scored), "force": True}
            self._tools.score(self._request.model_copy(update=asked), lambda *_: self._tools.note(None))
        self._write_answers(scored, self._batch.endpoint)
        for left in (pairs, scored, _errors_of(scored), record_of(scored)):
            left.unlink(missing_ok=True)

    def _keep_scored(self, made: Made, errors: Made | None, rows: int, failed: int) -> None:
        """Note the files of a batch of pairs."""
        self._store.count(self._batch.id, BatchCounts(total=rows, completed=rows - failed, failed=failed))
        self._keep(output_id(self._batch.id), made)
        if errors:
            self._keep(errors_id(self._batch.id), errors)
        self._tools.note(made)

    def _write_pairs(self, target: Path, endpoint: str) -> None:
        """Write the pairs of all lines, unless a runner that has died has done so."""
        if target.exists():
            return
        lines = 0
        with _partial(target) as file, pq.ParquetWriter(file, _PAIRS) as writer:
            rows: list[tuple[int, str, str]] = []
            for request in read_requests(self._input, endpoint):
                self._check(request)
                lines += 1
                rows += [(request.number, query, passage) for query, passage in request.pairs]
                if len(rows) >= _ROWS:
                    writer.write_batch(_batch(rows))
                    rows = []
            writer.write_batch(_batch(rows))
        self._store.count(self._batch.id, BatchCounts(total=lines))
        publish(Path(file.name), target)

    def _check(self, request: Request) -> None:
        """Raise `InputError` if a request cannot be scored with the others."""
        if request.asked is None:
            return
        model = request.asked.model or self._batch.default
        if model != self._batch.model:
            raise InputError(
                f"line {request.number}: asks for the model {model}, and the first line for "
                f"{self._batch.model}: a batch has one model"
            )
        if dict(request.asked.spec) != self._batch.asked:
            raise InputError(
                f"line {request.number}: its options are not those of the first line, which all share"
            )

    def _write_answers(self, scored: Path, endpoint: str) -> None:
        """Write the output, and the lines with errors if there are any."""
        errors_path = self._output.with_name("errors.jsonl")
        counts = {True: 0, False: 0}
        with _partial(self._output) as answers, _partial(errors_path) as errors:
            for request, scores in self._scored(scored, endpoint):
                counts[request.refusal is None] += 1
                if request.refusal:
                    errors.write(failure(request, self._batch.id).encode())
                else:
                    model = self._batch.model or self._run.order.spec.model
                    line = answer(request, self._batch.id, model, scores, self._run.created)
                    answers.write(line.encode())
        made, failed = Made(Path(answers.name), self._output), Made(Path(errors.name), errors_path)
        done = BatchCounts(total=sum(counts.values()), completed=counts[True], failed=counts[False])
        self._store.count(self._batch.id, done)
        if done.failed:
            self._keep(errors_id(self._batch.id), failed)
            publish(failed.partial, failed.path)
        else:
            failed.partial.unlink()
        self._keep(output_id(self._batch.id), made)
        self._tools.note(made)
        publish(made.partial, made.path)

    def _scored(self, scored: Path, endpoint: str) -> Iterator[tuple[Request, list[float]]]:
        """Each request with its scores; one that has a row without a score is refused."""
        reasons = _reasons(_errors_of(scored))
        row, found = 0, _scores(scored)
        for request in read_requests(self._input, endpoint):
            scores: list[float] = []
            refused = request
            for place in range(len(request.pairs)):
                score = next(found, _END)
                if score is _END:
                    raise RunFailed("the file of the batch has changed since its pairs were taken")
                if score is None and refused.refusal is None:
                    why = f"text {place} cannot be scored: {reasons.get(row, 'no reason is known')}"
                    refused = request.refused(Refusal("unscorable", why))
                scores.append(score if isinstance(score, float) else float("nan"))
                row += 1
            yield refused, scores
        if next(found, _END) is not _END:
            raise RunFailed("the file of the batch has changed since its pairs were taken")

    def _keep(self, file_id: str, made: Made) -> None:
        """Write the record of a file."""
        now = self._run.started or self._run.created
        self._store.add_file(
            FileRecord(
                id=file_id,
                owner=self._batch.owner,
                name=f"{self._batch.id}_{made.path.name}",
                place=f"{self._batch.id}/{made.path.name}",
                bytes=made.partial.stat().st_size,
                created=now,
                expires=now + self._store.ttl,
                purpose="batch_output",
            )
        )

    @property
    def _input(self) -> Path:
        return as_path(self._request.inputs[0])


_END = object()


def _scores(scored: Path) -> Iterator[object]:
    """The scores of a file, row by row; ``None`` for a row without one."""
    with pq.ParquetFile(open_random(scored)) as file:
        for batch in file.iter_batches(columns=["score"]):
            yield from batch.column(0).to_pylist()


def _reasons(errors: Path) -> dict[int, str]:
    """Why rows have no score."""
    if not errors.exists():
        return {}
    with open_bytes(errors) as file:
        found = [json.loads(line) for line in file]
    return {int(each["row"]): str(each["error"]) for each in found}


def _errors_of(scored: Path) -> Path:
    return scored.with_name(f"{scored.name}.errors.jsonl")


def _batch(rows: list[tuple[int, str, str]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _PAIRS, strict=True)], schema=_PAIRS
    )


@contextmanager
def _partial(target: Path) -> Iterator[IO[bytes]]:
    """A file that is complete after the ``with`` block, and gone after an error in it."""
    with tempfile.NamedTemporaryFile(dir=beside(target), prefix=".partial-", delete=False) as file:
        try:
            yield file
            file.flush()
        except BaseException:
            os.unlink(file.name)  # noqa: PTH108
            raise
