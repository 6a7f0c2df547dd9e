"""Submitted runs of files for `rankmill.testing`. No runner carries them out; the test itself ends them."""

from __future__ import annotations

from typing import Any

from rankmill.extensions.runners.record import FileRun, new_file_run
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.extensions.runners.store import FileRunStore
from rankmill.extensions.runners.submitted import SubmittedFiles
from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.runtime.settings import Settings


class FakeFileStore(FileRunStore):
    """Keeps submitted runs in a dictionary of this process, in place of Redis."""

    def __init__(self, runs: dict[str, FileRun], ttl: int) -> None:
        self._runs, self.ttl = runs, ttl

    def submit(self, order: FileOrder, run_id: str | None = None) -> FileRun:
        run = new_file_run(order, run_id)
        self._runs[run.id] = run
        return run

    def has(self, run_id: str) -> bool:
        return run_id in self._runs

    def find(self, prefix: str) -> list[str]:
        return sorted(run_id for run_id in self._runs if run_id.startswith(prefix))

    def cancel(self, run: FileRun) -> FileRun:
        self._runs[run.id] = run.end("cancelled")
        return self._runs[run.id]

    def _read(self, raw: bytes, run_id: str) -> FileRun | None:
        return self._runs.get(run_id)

    def _is_gone(self, run_id: str) -> bool:
        return False


def on_fake_server(store: Any, settings: Settings) -> SubmittedFiles:
    """Return the submitted runs of the fake server `store`, as `SubmittedFiles`."""
    return SubmittedFiles(FakeFileStore(store.files, settings.of(RunnerSettings).file_run_ttl))
