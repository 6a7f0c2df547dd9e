"""What a `Client` can do with runs that outlive it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jobs.errors import InputError
from jobs.runtime.specs import run_spec
from jobs.spec import ScoreSpec
from producer.submitted.file import SubmittedFile, file_request, submit_file, submitted_files

if TYPE_CHECKING:
    from jobs.files.request import FileRequest
    from jobs.files.store import FileRunStore
    from jobs.registry.resolver import Resolver
    from jobs.runtime.settings import Settings
    from jobs.store.runs import RunStore


class SubmittedRuns:
    """The part of `producer.client.Client` for runs that outlive it."""

    settings: Settings
    store: RunStore
    _resolver: Resolver

    @property
    def files(self) -> FileRunStore:
        """The submitted runs of files on the server."""
        return submitted_files(self.store.redis, self.settings)

    def submit_file(
        self, inputs: str | Sequence[str], output: str, *, webhook: str | None = None, **options: Any
    ) -> SubmittedFile:
        """Hand files to runners (``rankmill runner``), which score them whatever becomes of this process.

        Parameters
        ----------
        inputs, output
            As of score-file: paths on hosts where runners are, which need not see this process's files.
        webhook
            URL that a runner calls at the end.
        options
            Options of score-file by name, such as ``top_k`` or ``score_column``, and fields of `ScoreSpec`.

        Raises
        ------
        ConfigError
            An option is unknown or not valid.
        """
        spec = {name: options.pop(name) for name in list(options) if name in ScoreSpec.model_fields}
        return self.submit_request(file_request(inputs, output, options), webhook=webhook, **spec)

    def submit_request(
        self, request: FileRequest, *, webhook: str | None = None, **spec: Any
    ) -> SubmittedFile:
        """`submit_file`, for a request that is made already."""
        return submit_file(
            self.files, request, self._resolver.pinned(run_spec(self.settings, spec)), self.settings, webhook
        )

    def submitted_file(self, run_id: str) -> SubmittedFile:
        """The submitted run of files whose id is `run_id`, or begins so.

        Raises
        ------
        InputError
            Several do.
        """
        store = self.files
        found = store.find(run_id)
        if len(found) > 1:
            raise InputError(
                f"{len(found)} submitted runs begin with {run_id}: {', '.join(found[:5])}; say more of the id"
            )
        return SubmittedFile(store, found[0] if found else run_id)
