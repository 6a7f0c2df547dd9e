"""Finds models by name: ``shelf:NAME`` is the folder NAME in the folder that the setting ``shelf`` names."""

from collections.abc import Iterable
from pathlib import Path

from rankmill.jobs.cache import KeptFolder
from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.model_files import model_content
from rankmill.jobs.model_names import CacheRoom, Choice, ModelCopy
from rankmill.jobs.runtime.settings import ExtensionSettings, WorkerSettings

PREFIX = "shelf:"


class ShelfSettings(ExtensionSettings):
    """The setting of this plugin."""

    of_workers = True

    shelf: str = "models"


class ShelfModels:
    """The models in a folder."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._folder = Path(settings.of(ShelfSettings).shelf)

    def owns(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def choice(self, model: str) -> Choice:
        return Choice(model, {model: 1.0})

    def copy(self, model: str, content: str | None, cache: CacheRoom) -> ModelCopy:
        name = model.removeprefix(PREFIX)
        if name not in (folder.name for folder in self._folder.glob("*/")):
            raise WorkerError(f"{self._folder} on this host has no folder {name}")
        found = model_content(self._folder / name)
        if content not in (None, found):
            raise WorkerError(f"{model} on this host is not the model that the run began with")
        return ModelCopy(self._folder / name, found)

    def kept(self, cache: Path) -> Iterable[KeptFolder]:
        return ()
