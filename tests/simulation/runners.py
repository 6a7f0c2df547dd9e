"""Runs that were handed to runners: submitted files, and batches of the gateway."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from typing import Any

import rankmill.extensions.batches.service as service_module
import rankmill.extensions.batches.work as batch_work_module
import rankmill.extensions.runners.work as work_module
import rankmill.producer.files.stores.roots as roots_module
from rankmill.extensions.batches.records import BatchRecord
from rankmill.extensions.batches.service import Batches, NewBatch
from rankmill.extensions.batches.views import ENDED
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.scoring import ServedModels
from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.runner import Runner
from rankmill.extensions.runners.store import open_store
from rankmill.extensions.runners.submitted import SubmittedFile
from rankmill.jobs.contract.errors import OutputError, RankmillError, RunCancelled, RunExpired, RunFailed
from rankmill.jobs.runtime.settings import Sourced
from rankmill.producer.files.stores.roots import Roots
from tests.simulation.cluster import MODEL, POISON, Cluster, Submitted
from tests.simulation.files import FileCommand, hidden_record, left_over
from tests.simulation.producers import Command, is_deserted, mixed, wrong_score
from tests.simulation.world import Process, world

_ENDPOINT = "/v1/score"

_NO_RUNNER = "no runner can score it"
"""Why a run has failed that its user submits again: all runners have trouble with their disks."""

_DIED = "runners in a row have died of it"
_DEATHS = 4
"""Likewise: why it has failed, and how many runners have died then. Faults have killed them, no row of it."""

_WRONG = "scores of this output are wrong"
"""Why it has failed when a worker was broken: its user starts over."""

_LINE_ROWS = 4
"""Passages in a line of a batch."""


def _fails_for_others(cluster: Cluster, why: str) -> bool:
    """Whether a run has failed for what its runners have met, so that its user submits it again."""
    dead = sum(each.name.startswith("runner-") and not each.alive for each in cluster.world.processes)
    disk_fails = cluster.disk is not None and cluster.disk.has_failed
    return (_NO_RUNNER in why and disk_fails) or (_DIED in why and dead >= _DEATHS)


class _Confined(list[Roots]):
    """What `roots.confine` has said in a process: runners are confined, others are not."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.disk
        folder = str(cluster.disk.root)
        super().__init__([Roots([folder], [folder])])
        self._cluster = cluster

    def __bool__(self) -> bool:
        here = world().current
        return here is not None and here.process in self._cluster.runners


def prepare(cluster: Cluster) -> None:
    """Let runners and the gateway use the world's server and signals."""
    mine = cluster.world

    def handle(number: int, handler: Any) -> None:
        assert mine.current
        mine.current.process.handlers[number] = handler

    def send(_: int, number: int) -> None:
        assert mine.current
        mine.signal(mine.current.process, number)

    mine.patch(signal, "signal", handle)
    mine.patch(os, "kill", send)
    mine.patch(roots_module, "_confined", _Confined(cluster))
    for module in (work_module, batch_work_module, service_module):
        mine.patch(module, "client_for", lambda _, seconds: mine.redis.client(seconds))


def keep(cluster: Cluster, *, clock: float = 0.0) -> None:
    """Start a runner, and another one in its place a second after each of its ends."""
    assert cluster.disk
    settings = cluster.file_settings()

    def main() -> None:
        client = cluster.world.redis.client(settings.redis_wait_seconds)
        Runner(open_store(client, settings), settings).work()

    process = cluster.world.process(f"runner-{len(cluster.runners) + 1}", main, clock=clock)
    process.disk = cluster.disk
    cluster.disk.processes.append(process)
    cluster.runners.append(process)
    process.on_exit.append(lambda: cluster.leave_runs_of(process))
    process.on_exit.append(lambda: cluster.later(1.0, lambda: keep(cluster, clock=clock)))


class SubmittedCommand(FileCommand):
    """``rankmill submit INPUT -o OUTPUT``, and a process that waits for the end.

    A run that the server has lost is submitted again, as its user is told to; one that is kept not, as long
    as the runner lives that had it then: that writes it again.
    """

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        self.id = ""
        self.times = 0
        self.record: FileRun | None = None
        super().__init__(cluster, run)

    def do(self) -> Any:
        client = self.client()
        while True:
            if not self.id:
                self.times += 1
                asked = self.request.model_dump(include={"rows_per_part", "restart"}, exclude_none=True)
                self.id = client.submit_file(str(self.input), str(self.output), **asked).id
            handle = client.attach(self.id)
            assert isinstance(handle, SubmittedFile)
            try:
                if self.run.kind.endswith("cancelled"):
                    world().sleep(3.0)
                    handle.cancel()
                self.record = handle.wait(600.0)
                return self.record
            except RunExpired:
                self._forget()

    def _forget(self) -> None:
        runner = self.cluster.world.history.kept.get(self.id)
        if "kept" in self.how and runner and runner.alive:
            world().sleep(1.0)
        else:
            self.id = ""

    def is_final(self, error: RankmillError) -> bool:
        if isinstance(error, RunExpired):  # before it was attached
            self._forget()
            return False
        unlucky = isinstance(error, RunFailed) and _fails_for_others(self.cluster, str(error))
        unlucky = unlucky or (_WRONG in str(error) and bool(self.cluster.world.history.broken))
        if unlucky or self.finds_other_machines(error):
            self.id = ""
            return False
        if isinstance(error, RunFailed | RunCancelled):
            return True
        return super().is_final(error)

    def on_disk(self, process: Process) -> None:
        """It needs no files; those of its run are the runners'."""

    def wrong(self) -> list[str]:
        found = self.found
        if self.run.kind.endswith("cancelled") and isinstance(found, RunCancelled):
            return self.problems
        twice = self.times > 1 or self.attempts > 1  # the second has found what the first has made
        if isinstance(found, RankmillError) and not (twice and "exists already" in str(found)):
            return [f"{self.run.name} ended with {type(found).__name__}: {found}"]
        return super().wrong()

    def left_over(self) -> list[str]:
        """The same; a run that is cancelled keeps what it has scored."""
        return [] if isinstance(self.found, RunCancelled) else super().left_over()

    @property
    def _over_at(self) -> float:
        return self.cluster.world.history.over.get(self.id, self.ended)

    @property
    def _tidied_at(self) -> float:
        return self.cluster.world.history.let_go.get(self.id, self.ended)

    def used(self) -> tuple[int, int]:
        least, most = super().used()
        return 0 if self.times > 1 else least, most * max(self.times, 1)

    def expected(self) -> set[str]:
        return super().expected() | {hidden_record(self.output)}


class BatchCommand(Command):
    """A batch of requests as OpenAI's API has it; each line has some passages of one query."""

    def __init__(self, cluster: Cluster, run: Submitted) -> None:
        assert cluster.disk
        self.folder = cluster.disk.root / run.name
        self.folder.mkdir()
        self.batch = ""
        pairs = [(query or "no query", passage or "no passage") for query, passage in run.pairs]
        self.lines = [
            (pairs[at][0], [passage for _, passage in pairs[at : at + _LINE_ROWS]])
            for at in range(0, len(pairs), _LINE_ROWS)
        ]
        asked = tuple((query, passage) for query, passages in self.lines for passage in passages)
        super().__init__(cluster, replace(run, pairs=asked))

    def do(self) -> Any:
        settings = self.cluster.file_settings(self.run)
        settings._of_extensions = {"gateway_files": Sourced(str(self.folder), "the simulation")}
        batches = Batches(settings, "redis://simulated")
        if not self.batch:
            text = "".join(json.dumps(self._line(number)) + "\n" for number in range(len(self.lines)))
            file = batches.upload(None, "in.jsonl", io.BytesIO(text.encode()), len(text))
            asked = NewBatch.model_validate({"input_file_id": file.id, "endpoint": _ENDPOINT})
            self.batch = batches.create(None, asked, ServedModels(settings).resolve)["id"]
        try:
            while (view := self._view(batches))["status"] not in ENDED:
                world().sleep(0.5)
        except Refusal:
            return "expired"
        differs = is_deserted(self.cluster.world.history, view) or (
            "computes wrong scores" in str(view) and bool(self.cluster.world.history.broken)
        )
        if view["status"] == "failed" and (differs or _fails_for_others(self.cluster, str(view))):
            self.batch = ""
            raise OutputError(str(view))
        return view if view["status"] != "expired" else "expired"

    def is_final(self, error: RankmillError) -> bool:
        return not isinstance(error, OutputError)  # a client sends the file again

    def _begin(self, wait: float) -> Process:
        assert self.cluster.disk
        process = super()._begin(wait)
        process.disk = self.cluster.disk
        self.cluster.disk.processes.append(process)
        return process

    def _view(self, batches: Batches) -> dict[str, Any]:
        return batches.view(batches.find(BatchRecord, None, self.batch))

    def _line(self, number: int) -> dict[str, Any]:
        query, passages = self.lines[number]
        body = {"model": MODEL, "text_1": query, "text_2": passages}
        return {"custom_id": str(number), "method": "POST", "url": _ENDPOINT, "body": body}

    @property
    def _over_at(self) -> float:
        return self.cluster.world.history.over.get(self.batch.removeprefix("batch_"), self.ended)

    def used(self) -> tuple[int, int]:
        least, most = super().used()
        return least, most * self.cluster.world.history.times_counted

    def wrong(self) -> list[str]:
        """Whether each line has its answer or its error once, in order."""
        name, found = self.run.name, self.found
        if self.cluster.world.history.lost and found == "expired":
            return []  # it says so: the server had forgotten it
        if not isinstance(found, dict) or found["status"] != "completed":
            return [f"{name} ended as {found}"]
        folder = self.folder / self.batch
        answers, errors = (_read(folder / each) for each in ("output.jsonl", "errors.jsonl"))
        told: list[tuple[int, float]] = []
        for number, (_, passages) in enumerate(self.lines):
            listed = errors if POISON in passages or self._is_lost(number, errors) else answers
            if not listed or listed[0]["custom_id"] != str(number):
                return [f"{name}: line {number} has no {'error' if POISON in passages else 'answer'}"]
            body = listed.pop(0)["response"]["body"]
            scores = [each["score"] for each in body.get("data", ())]
            if listed is errors:
                continue
            if len(scores) != len(passages):
                return [f"{name}: line {number} has {len(scores)} scores of {len(passages)}"]
            rows = [*enumerate(scores, number * _LINE_ROWS)]
            told += rows
            for row, score in rows:
                if why := wrong_score(self.run, row, score, may_be_wrong=self.may_be_wrong):
                    return [why]
        if found := mixed(self.run, told):
            return found
        return [f"{name} has {len(answers) + len(errors)} lines too many"] if answers or errors else []

    def _is_lost(self, number: int, errors: list[Any]) -> bool:
        """Whether the next error is this line's, as a row was lost too often; callers are not told why."""
        if not errors or errors[0]["custom_id"] != str(number):
            return False
        _, _, why = errors[0]["response"]["body"]["error"]["message"].partition(": ")
        rows = range(number * _LINE_ROWS, (number + 1) * _LINE_ROWS)
        return any(self.cluster.world.history.may_be_lost(row, f"{why}: it was lost") for row in rows)

    def left_over(self) -> list[str]:
        """What lies beside the answers; what was deleted just before a loss of power may be there again."""
        folder = self.folder / self.batch
        if not self.is_complete or (self.cluster.disk and self.cluster.disk.lost_at >= self.ended):
            return []
        records = {hidden_record(folder / each) for each in ("output.jsonl", "scored.parquet")}
        return left_over(self.run, folder, {"output.jsonl", "errors.jsonl", *records})


def _read(path: Any) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
