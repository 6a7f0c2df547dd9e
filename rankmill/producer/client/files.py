"""Runs of files that other processes carry out. An extension gives access to runs of files by an entry point
of ``rankmill.files``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import ValidationError

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.file_run import FileRunState
from rankmill.jobs.contract.spec import ScoreSpec, complaint
from rankmill.plugins import load

if TYPE_CHECKING:
    from rankmill.jobs.protocol.runs import RunStore
    from rankmill.jobs.runtime.settings import Settings


class FileHandle(Protocol):
    """What the caller of `Client.submit_file` gets: a submitted run of files."""

    @property
    def id(self) -> str:
        """The run's id, by which any process can attach to the run."""

    def status(self) -> FileRunState:
        """The run's present state, progress and result."""

    def wait(
        self, timeout: float | None = None, *, on_look: Callable[[Any], None] = lambda run: None
    ) -> FileRunState:
        """Wait for the end of the run; `on_look` gets the run's state several times a second.

        Raises
        ------
        TimeoutError
            The run has not ended within `timeout` seconds.
        RunFailed, RunCancelled
            The run has ended without an output.
        """

    def cancel(self) -> FileRunState:
        """Cancel the run; its scores are kept."""

    def awaited(self) -> AsyncFileHandle:
        """A handle of the same run for asyncio."""


class AsyncFileHandle(Protocol):
    """A `FileHandle` for asyncio."""

    @property
    def id(self) -> str:
        """The run's id, by which any process can attach to the run."""

    async def status(self) -> FileRunState:
        """The run's present state, progress and result."""

    async def wait(self, timeout: float | None = None) -> FileRunState:
        """Wait for the end of the run; raises as `FileHandle.wait`."""

    async def cancel(self) -> FileRunState:
        """Cancel the run; its scores are kept."""


class FileRuns(Protocol):
    """The submitted runs of files on a server."""

    def submit(
        self, request: FileRequest, spec: ScoreSpec, settings: Settings, webhook: str | None
    ) -> FileHandle:
        """Submit a run that carries out `request`, which `FileRequest.at_home` has made. Raises `ConfigError`
        if the webhook is not a URL.
        """

    def attach(self, run_id: str) -> FileHandle | None:
        """The run with an id; ``None`` if it does not exist."""


def file_runs(store: RunStore, settings: Settings) -> FileRuns | None:
    """The submitted runs of files on the server of `store`; ``None`` if no installed extension carries out
    such runs.
    """
    try:
        open_runs = load("rankmill.files", store.server_kind)
    except KeyError:
        return None
    return cast("FileRuns", open_runs(store, settings))


def file_request(inputs: str | Sequence[str], output: str, options: Mapping[str, Any]) -> FileRequest:
    """Make a request from arguments of `Client.submit_file`; raises `ConfigError` for an unknown or invalid
    option.
    """
    given = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    try:
        return FileRequest(inputs=given, output=output, **options)
    except ValidationError as error:
        names = {*FileRequest.model_fields, *ScoreSpec.model_fields, "webhook"}
        raise ConfigError(complaint(error, names)) from None
