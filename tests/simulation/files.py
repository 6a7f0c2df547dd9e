"""Runs of files: real inputs, journals and outputs, made by processes that die at any write."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import rankmill.score.session as session_module
import rankmill.score.summary as summary_module
from rankmill.jobs.contract.errors import InputChanged, InputError, RankmillError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.producer.files.stores.output_record import record_of
from rankmill.producer.files.stores.paths import workspace_of
from rankmill.score.progress import progress_view
from rankmill.score.score_file import score_file
from tests.simulation.cluster import POISON, Cluster, Pair, SimulatedClient, Submitted
from tests.simulation.history import History
from tests.simulation.producers import KILLED, Command, mixed, wrong_score
from tests.simulation.world import Process

_ROWS_PER_PART = 50

_BEFORE = (("an earlier query", "an earlier passage"),)
"""What was scored to an output that was there before."""

_version = cache(version)


def prepare(cluster: Cluster) -> None:
    """Let score-file use the world's server, and read the versions of packages from files once."""
    cluster.world.patch(session_module, "Client", SimulatedClient)
    cluster.world.patch(summary_module, "version", _version)


class FileCommand(Command):
    """``rankmill score INPUT -o OUTPUT``, given again until the output is there.

    The run's kind names the form of its input and output: parquet, jsonl, or parts; and whether the output
    was there before, and is to be replaced.
    """

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        assert cluster.disk
        self.folder = cluster.disk.root / run.name
        self.folder.mkdir()
        form, *self.how = run.kind.split()[1:]
        self.in_parts = form == "parts"
        ending = "jsonl" if form == "jsonl" else "parquet"
        self.input = write_pairs(self.folder / f"in.{ending}", run.pairs)
        self.output = self.folder / ("out" if self.in_parts else f"out.{ending}")
        self.kept = 0
        if "replaced" in self.how:
            self.output.mkdir() if self.in_parts else None
            write_pairs(
                self.output / f"part-00001-of-00002.{ending}" if self.in_parts else self.output, _BEFORE
            )
        super().__init__(cluster, run)

    @property
    def request(self) -> FileRequest:
        """What is asked for; after wrong scores the user starts over, as told."""
        return FileRequest(
            inputs=(str(self.input),),
            output=str(self.output),
            rows_per_part=_ROWS_PER_PART if self.in_parts else None,
            restart="start over with --restart" in str(self.found),
            force="replaced" in self.how,
        )

    def do(self) -> Any:
        view = partial(progress_view, quiet=True)
        summary = score_file(self.request, self.cluster.file_settings(self.run), view=view)
        if summary.resumed_rows < self.kept and not self.cluster.world.history.broken:
            self.problems.append(
                f"{self.run.name} continued with {summary.resumed_rows} rows of {self.kept} in its journal"
            )
        return summary

    def is_final(self, error: RankmillError) -> bool:
        """No trouble of a disk or a server is the input's fault, or asks the user for more than patience."""
        if isinstance(error, InputError) and self.attempts > 1 and "exists already" in str(error):
            return True  # it was made by a process that died before it could say so
        if self.finds_other_machines(error):
            return False
        if isinstance(error, InputError | InputChanged):
            self.problems.append(f"{self.run.name} ended with {type(error).__name__}: {error}")
            return True
        return False

    def _begin(self, wait: float) -> Process:
        process = super()._begin(wait)
        self.on_disk(process)
        return process

    def on_disk(self, process: Process) -> None:
        """Give a process its files."""
        assert self.cluster.disk
        process.disk = self.cluster.disk
        self.cluster.disk.processes.append(process)

    def _ended(self) -> None:
        assert self.cluster.disk
        begun = self.cluster.begun.get(self.process, set())
        self.cluster.leave_runs_of(self.process)
        if self.process.status == KILLED or not self.over:
            _, self.kept = self.cluster.disk.journal(workspace_of(self.output) / "journal.db")
        super()._ended()
        self.cluster.abandoned |= begun if self.leaves_keys else set()

    def wrong(self) -> list[str]:
        """What is wrong with the output."""
        assert self.cluster.disk
        history = self.cluster.world.history
        return self.problems or wrong_output(self.run, self.output, history, may_be_wrong=self.may_be_wrong)

    def left_over(self) -> list[str]:
        """What lies beside the output; what was deleted just before a loss of power may be there again."""
        assert self.cluster.disk
        is_restored = self.cluster.disk.lost_at >= self._tidied_at
        return [] if is_restored else left_over(self.run, self.folder, self.expected())

    @property
    def _tidied_at(self) -> float:
        """By when all was deleted that should not be left."""
        return self.ended

    def used(self) -> tuple[int, int]:
        rows = len(self.run.pairs)  # once, however often the command is given: its results are in the journal
        counted = self.is_complete and not self.leaves_keys
        history = self.cluster.world.history  # what is replaced anyway is scored again when it is complete
        times = self.attempts if "replaced" in self.how else history.times_counted
        return rows if counted else 0, rows * times

    def expected(self) -> set[str]:
        """Names of all that may be in the folder at the end."""
        return {self.input.name, self.output.name, f"{self.output.name}.errors.jsonl"}


def write_pairs(path: Path, pairs: tuple[Pair, ...]) -> Path:
    """Write pairs, with the numbers of their rows."""
    rows = [{"row": row, "query": pair[0], "passage": pair[1]} for row, pair in enumerate(pairs)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        schema = pa.schema({"row": pa.int64(), "query": pa.string(), "passage": pa.string()})
        pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return path


def wrong_output(run: Submitted, output: Path, history: History, *, may_be_wrong: bool) -> list[str]:
    """Whether each row is in the output once, in order, with its own score or its error."""
    if not output.exists():
        return [f"{run.name} has no output"]
    rows = [row for path in _parts(output) for row in _rows(path)]
    if [row["row"] for row in rows] != [*range(len(run.pairs))]:
        return [f"{run.name} has {len(rows)} rows in its output of {len(run.pairs)}, or in another order"]
    errors = {row: why for path in _parts(output) for row, why in _errors(path)}
    for number, (found, (query, passage)) in enumerate(zip(rows, run.pairs, strict=True)):
        score = found["score"]
        if (found["query"], found["passage"]) != (query, passage):
            return [f"{run.name}: row {number} has other texts"]
        fails = query is None or passage is None or passage == POISON
        lost = score is None or math.isnan(score)
        if not fails and lost and history.may_be_lost(number, errors.get(number)):
            continue
        if fails != (number in errors) or fails != lost:
            return [f"{run.name}: row {number} has the score {score}, and as error {errors.get(number)}"]
        if not fails and (why := wrong_score(run, number, score, may_be_wrong=may_be_wrong)):
            return [why]
    return mixed(run, ((row["row"], row["score"]) for row in rows if row["row"] not in errors))


def left_over(run: Submitted, folder: Path, expected: set[str]) -> list[str]:
    """What is in a folder that should not be there."""
    names = {path.name for path in folder.iterdir()} - expected
    return [f"{run.name}: {', '.join(sorted(names))} is left over"] if names else []


def _parts(output: Path) -> list[Path]:
    if not output.is_dir():
        return [output]
    return sorted(path for path in output.iterdir() if not path.name.startswith("_"))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        yield from map(json.loads, path.read_text().splitlines())
    else:
        yield from pq.read_table(path).to_pylist()


def _errors(path: Path) -> Iterator[tuple[int, str]]:
    listed = path.with_name(f"{'_' if path.name.startswith('part-') else ''}{path.name}.errors.jsonl")
    if listed.exists():
        for each in map(json.loads, listed.read_text().splitlines()):
            yield each["row"], each["error"]


def hidden_record(output: Path) -> str:
    """The name of what a runner notes beside an output."""
    return record_of(output).name
