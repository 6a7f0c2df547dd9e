"""Handles of submitted runs. Any process that knows a run's id may ask for its status, wait for it, or cancel
it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from pydantic import ValidationError

from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.store import FileRunStore, open_store
from rankmill.jobs.contract.errors import ConfigError, InputError, RunCancelled, RunFailed, RunTimeout
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.patience import redis_errors, waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.aio import bridge

_LOOK_SECONDS = 0.3


class SubmittedFile:
    """Handle of a submitted run of files. Runners score the files even if this process ends.

    Each method that asks the server raises `RunExpired` if the run ended too long ago, or if the server has
    lost it.
    """

    def __init__(self, store: FileRunStore, run_id: str) -> None:
        self._store = store
        self.id = run_id
        """The run's id, from which any process can make a handle."""

    def status(self) -> FileRun:
        """The run's present state, progress and result."""
        with redis_errors():
            return self._store.load(self.id)

    def wait(
        self, timeout: float | None = None, *, on_look: Callable[[FileRun], None] = lambda run: None
    ) -> FileRun:
        """Wait for the end of the run; `on_look` gets the run's state several times a second.

        Raises
        ------
        RunTimeout
            The run has not ended within `timeout` seconds; it continues.
        RunFailed, RunCancelled
            The run has ended without an output.
        """
        deadline = math.inf if timeout is None else system.monotonic() + timeout

        def check_time() -> None:
            if system.monotonic() >= deadline:
                raise RunTimeout(f"submitted run {self.id} has not ended", "it goes on")

        while True:
            with waiting(look=check_time, until=deadline):
                run = self.status()
            if run.is_ended:
                break
            on_look(run)
            check_time()
            self._pause(min(max(deadline - system.monotonic(), 0), _LOOK_SECONDS))
        if run.state == "failed":
            raise RunFailed(f"submitted run {self.id} has failed: {run.reason}")
        if run.state == "cancelled":
            raise RunCancelled(f"submitted run {self.id} was cancelled")
        return run

    def _pause(self, seconds: float) -> None:
        system.sleep(seconds)

    def awaited(self) -> AsyncSubmittedFile:
        """A handle of the same run, for asyncio."""
        return AsyncSubmittedFile(_LoopFile(self._store, self.id))

    def cancel(self) -> FileRun:
        """Cancel the run. If a runner holds the run, the run ends with the runner's next heartbeat. Rows that
        are scored already stay in the run's folder, and are used if the same run is submitted again.
        """
        with redis_errors():
            run = self._store.load(self.id)
            return run if run.is_ended else self._store.cancel(run)


class _LoopFile(SubmittedFile):
    """A `SubmittedFile` for code that `bridge.run` calls. While it waits, the event loop continues."""

    def _pause(self, seconds: float) -> None:
        bridge.wait(asyncio.sleep(seconds))


class AsyncSubmittedFile:
    """Handle of a submitted run for asyncio, like `SubmittedFile`. The run continues even if a task that
    waits for it is cancelled.
    """

    def __init__(self, run: SubmittedFile) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The run's id, from which any process can make a handle."""
        return self._run.id

    async def status(self) -> FileRun:
        """The run's present state, progress and result."""
        return await bridge.run(self._run.status)

    async def wait(self, timeout: float | None = None) -> FileRun:
        """Wait for the end of the run, as `SubmittedFile.wait` does."""
        return await bridge.run(self._run.wait, timeout)

    async def cancel(self) -> FileRun:
        """Cancel the run, as `SubmittedFile.cancel` does."""
        return await bridge.run(self._run.cancel)


def find_submitted(store: FileRunStore, prefix: str) -> SubmittedFile | None:
    """Find a submitted run by its id or the beginning of its id. Returns ``None`` if there is none.

    Raises
    ------
    InputError
        Several ids begin with `prefix`.
    """
    with redis_errors():
        ids = [prefix] if store.has(prefix) else store.find(prefix)
    if len(ids) > 1:
        raise InputError(
            f"{len(ids)} submitted runs begin with {prefix}: {', '.join(ids[:5])}; give more of the id"
        )
    return SubmittedFile(store, ids[0]) if ids else None


class SubmittedFiles:
    """Submits runs of files to a queue, and makes handles of them, for clients."""

    def __init__(self, store: FileRunStore) -> None:
        self.store = store

    def submit(
        self, request: FileRequest, spec: ScoreSpec, settings: Settings, webhook: str | None
    ) -> SubmittedFile:
        """Put a run of files into the queue of runners. `request` must come from `FileRequest.at_home`, which
        makes its paths absolute.

        Raises
        ------
        ConfigError
            The webhook is not an http or https URL, or a runner cannot call it.
        """
        try:
            order = FileOrder(
                request=request,
                spec=spec,
                queue=settings.queue,
                chunk_size=settings.chunk_size,
                webhook=webhook,
                tenant=settings.tenant or None,
                weight=settings.weight,
            )
        except ValidationError as error:
            raise ConfigError(
                f"webhook: {webhook!r:.80} is not an http:// or https:// URL of ASCII characters, with a "
                "host and perhaps a port, without a user name"
            ) from error
        with redis_errors():
            return self.handle(self.store.submit(order).id)

    def attach(self, run_id: str) -> SubmittedFile | None:
        return self.handle(run_id) if self.store.has(run_id) else None

    def handle(self, run_id: str) -> SubmittedFile:
        """Return a handle of the submitted run with this id. The id is not checked."""
        return SubmittedFile(self.store, run_id)


def on_server(store: RunStore, settings: Settings) -> SubmittedFiles:
    """Open the queue of submitted runs that the settings name, on the server of `store`."""
    return SubmittedFiles(open_store(store.redis, settings))
