"""Finds this host's copies of models that extensions know by name, and limits the cache's disk space."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankmill.jobs.cache import TEMPORARY_LOCK, KeptFolder, cache_folder
from rankmill.jobs.contract.errors import InputError, RankmillError, SpecError, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.model_names import ModelCopy, ModelNames
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.workers.backends.auto import backends
from rankmill.workers.host.disk_cache import make_room


class ModelCopies:
    """Finds the files of models that extensions know by name, such as registered models, and removes old
    ones.

    Parameters
    ----------
    settings
        The settings, including those of extensions; they name the cache folder and its limit.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.folder = cache_folder(settings.cache_dir)
        self._limit = settings.cache_bytes
        self._names = ModelNames(settings)

    def pinned(self, spec: ScoreSpec) -> ScoreSpec:
        """Return a copy of `spec` that names the exact model, if an extension knows the model's name.

        For example, an alias may stand for different models over time. If no extension knows the name, `spec`
        is returned unchanged.

        Raises
        ------
        WorkerError
            This worker cannot find out what the name stands for.
        """
        try:
            return self._names.pinned(spec)
        except RankmillError as error:
            raise WorkerError(str(error)) from error

    def find(self, model: str, content: str | None) -> ModelCopy | None:
        """Return this host's copy of a model that an extension knows by name, and fetch missing files.

        Parameters
        ----------
        model
            The model's name.
        content
            The digest that the files must have, if it is known.

        Returns
        -------
        ModelCopy
            Where the files are, or ``None`` if no extension knows the name.

        Raises
        ------
        SpecError
            No worker could ever have these files.
        WorkerError
            This worker cannot get the files; another worker may.
        """
        owner = self._names.owner(model)
        try:
            return None if owner is None else owner.copy(model, content, self)
        except InputError as error:
            raise SpecError(str(error)) from None

    def make_room(self, needed: int = 0, keep: Path | None = None) -> int:
        """Remove copies and converted models from the cache folder, the longest unused first, to make room.

        Returns the number of bytes that still do not fit. If the settings set no limit, nothing is removed.

        Parameters
        ----------
        needed
            Bytes for which there must be room.
        keep
            A folder that is not removed, and does not count.
        """
        return 0 if self._limit is None else make_room(self._kept(), self._limit, needed=needed, keep=keep)

    def _kept(self) -> Iterator[KeptFolder]:
        for owner in self._names.owners:
            yield from owner.kept(self.folder)
        for backend in backends():  # each backend keeps its conversions in a folder of its name
            for folder in (self.folder / backend).glob("*"):
                # a hidden folder is temporary, and locked while a process fills it
                yield KeptFolder(folder, folder / TEMPORARY_LOCK if folder.name.startswith(".") else None)
