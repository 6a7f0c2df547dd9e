"""Interfaces for files that other processes (runners) score. An extension implements these interfaces, and is
found by an entry point of the group ``rankmill.files``.
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
    """Handle of files that `Client.submit_file` has submitted for scoring."""

    @property
    def id(self) -> str:
        """The run's id, by which any process can attach to the run."""

    def status(self) -> FileRunState:
        """Read the run's present state, progress and result from the server."""

    def wait(
        self, timeout: float | None = None, *, on_look: Callable[[Any], None] = lambda run: None
    ) -> FileRunState:
        """Wait for the end of the run, and call `on_look` with the run's state several times a second.

        Raises
        ------
        TimeoutError
            The run has not ended within `timeout` seconds.
        RunFailed, RunCancelled
            The run has ended without an output.
        """

    def cancel(self) -> FileRunState:
        """Cancel the run. Its scores are kept, and are used if the same run is submitted again."""

    def awaited(self) -> AsyncFileHandle:
        """Return a handle of the same run for asyncio."""


class AsyncFileHandle(Protocol):
    """Handle of files that were submitted for scoring, like `FileHandle`, for asyncio."""

    @property
    def id(self) -> str:
        """The run's id, by which any process can attach to the run."""

    async def status(self) -> FileRunState:
        """Read the run's present state, progress and result from the server."""

    async def wait(self, timeout: float | None = None) -> FileRunState:
        """Wait for the end of the run; raises as `FileHandle.wait`."""

    async def cancel(self) -> FileRunState:
        """Cancel the run. Its scores are kept, and are used if the same run is submitted again."""


class FileRuns(Protocol):
    """Submits files for scoring to the runners of a server, and finds runs that were submitted earlier."""

    def submit(
        self, request: FileRequest, spec: ScoreSpec, settings: Settings, webhook: str | None
    ) -> FileHandle:
        """Submit the files that `request` names to runners, which score them. Raises `ConfigError` if the
        webhook is not a URL.

        The paths in `request` must be absolute, as `FileRequest.at_home` makes them.
        """

    def attach(self, run_id: str) -> FileHandle | None:
        """Return a handle of the run of files with this id, or ``None`` if the run does not exist."""


def file_runs(store: RunStore, settings: Settings) -> FileRuns | None:
    """Make the object that submits files for scoring to the server of `store`, and finds submitted runs.

    Returns ``None`` if no installed extension supports runs of files.
    """
    try:
        open_runs = load("rankmill.files", store.server_kind)
    except KeyError:
        return None
    return cast("FileRuns", open_runs(store, settings))


def file_request(inputs: str | Sequence[str], output: str, options: Mapping[str, Any]) -> FileRequest:
    """Make a `FileRequest` from the arguments of `Client.submit_file`. Raises `ConfigError` for an unknown or
    invalid option.
    """
    given = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    try:
        return FileRequest(inputs=given, output=output, **options)
    except ValidationError as error:
        names = {*FileRequest.model_fields, *ScoreSpec.model_fields, "webhook"}
        raise ConfigError(complaint(error, names)) from None
