"""Reads the weights of models for their digests in threads: for 100 GB that takes minutes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.sources import find_source
from rankmill.workers.models.versions.store import VersionStore

_AT_ONCE_SECONDS = 0.2
"""Reading that takes no longer than this is waited for."""

logger = logging.getLogger(__name__)


class Reading:
    """What is read of models before they are loaded, by models' names and revisions.

    Parameters
    ----------
    cache
        Folder where digests are remembered, so that the load finds them.
    versions
        Where models of a registry come from; they are fetched in the thread, too.
    """

    def __init__(self, cache: Path, versions: VersionStore | None) -> None:
        self._cache = cache
        self._versions = versions
        self._threads: dict[tuple[str, str | None], threading.Thread] = {}

    def goes_on(self, spec: ScoreSpec) -> bool:
        """Whether the model's files are still being read; begins that. When it has ended, load the model."""
        key = spec.model, spec.revision
        thread = self._threads.get(key)
        if thread is None:
            thread = threading.Thread(target=self._read, args=(spec,), name="digest", daemon=True)
            self._threads[key] = thread
            thread.start()
            thread.join(_AT_ONCE_SECONDS)
            if thread.is_alive():
                logger.info("reading the files of %s; other models are served meanwhile", spec.model)
        if thread.is_alive():
            return True
        del self._threads[key]
        return False

    def _read(self, spec: ScoreSpec) -> None:
        try:
            find_source(spec, self._versions, self._cache, ask_hub=False)
        except Exception as error:  # whatever it is, the load meets it again
            logger.debug("%s cannot be read: %s", spec.model, error)
