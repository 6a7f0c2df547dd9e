"""Runs as tasks have them: submitted, detached, and of files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from rankmill.producer.client.aio import bridge

if TYPE_CHECKING:
    from rankmill.jobs.contract.run import Progress
    from rankmill.jobs.protocol.submitted.record import FileRun
    from rankmill.producer.client.runs.detached import DetachedRun
    from rankmill.producer.client.runs.scores import RunStats, Scores
    from rankmill.producer.client.runs.split import AnyRun
    from rankmill.producer.client.submitted.file import SubmittedFile

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_SECONDS = 0.3


class AsyncScoringRun:
    """A submitted run, as `ScoringRun`. If the task that reads it is cancelled, the run is cancelled too."""

    def __init__(self, run: AnyRun) -> None:
        self._run = run

    @property
    def model(self) -> str:
        """The model that scores, with the version that an alias stood for."""
        return self._run.model

    @property
    def id(self) -> str:
        """The run's id, as it appears in logs and Redis keys."""
        return self._run.id

    @property
    def progress(self) -> Progress:
        """The rows done so far, those of unfinished chunks included, and the speed."""
        return self._run.progress

    @property
    def stats(self) -> RunStats:
        """How the rows read so far were scored."""
        return self._run.stats

    @property
    def errors(self) -> Mapping[int, str]:
        """Reasons by row number (from 0) for the rows read so far that have no score."""
        return self._run.errors

    async def scores(self, timeout: float | None = None) -> Scores:
        """Wait for all scores as `ScoringRun.scores` does."""
        return await self._read(self._run.scores, timeout)

    async def __aiter__(self) -> AsyncIterator[float]:
        """Yield the scores in input order, each as soon as it is available; NaN for rows in `errors`."""
        scores = iter(self._run)
        while (score := await self._read(next, scores, None)) is not None:
            yield score

    async def cancel(self) -> None:
        """Cancel the run: its waiting chunks leave the queue, and its keys are deleted."""
        await bridge.run(self._run.cancel)

    async def _read(self, do: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        try:
            return await bridge.run(do, *args, **options)
        except asyncio.CancelledError:
            await self.cancel()
            raise


class AsyncDetachedRun:
    """A detached run, as `DetachedRun`; it goes on if the task that waits for it is cancelled."""

    def __init__(self, run: DetachedRun) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The run's id, with which any process can fetch its scores."""
        return self._run.id

    async def progress(self) -> Progress:
        """The rows that are done now."""
        return await bridge.run(lambda: self._run.progress)

    async def scores(self, timeout: float | None = None) -> Scores:
        """Wait for all scores as `DetachedRun.scores` does."""
        return await bridge.run(self._run.scores, timeout)

    async def cancel(self) -> None:
        """Delete the run with its results."""
        await bridge.run(self._run.cancel)


class AsyncSubmittedFile:
    """A run of files that runners carry out, as `SubmittedFile`; it goes on if its task is cancelled."""

    def __init__(self, run: SubmittedFile) -> None:
        self._run = run

    @property
    def id(self) -> str:
        """The run's id, with which any process can ask for it."""
        return self._run.id

    async def status(self) -> FileRun:
        """The run as it is now: its state, progress, and what it has made."""
        return await bridge.run(self._run.status)

    async def wait(self, timeout: float | None = None) -> FileRun:
        """Wait for the end of the run as `SubmittedFile.wait` does."""
        try:
            async with asyncio.timeout(timeout):
                while (run := await bridge.run(self._run.outcome)) is None:
                    await asyncio.sleep(_LOOK_SECONDS)
                return run
        except TimeoutError:
            raise TimeoutError(f"submitted run {self.id} has not ended; it goes on") from None

    async def cancel(self) -> FileRun:
        """Cancel the run. One that a runner has ends with its next heartbeat; its scores are kept."""
        return await bridge.run(self._run.cancel)
