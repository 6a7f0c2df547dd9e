"""A queue on which a run is in progress for as long as a test wants. Fixture `held`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.misbehaving import MARKS
from tests.harness.models.tiny import make_bert
from tests.harness.processes import StartWorker
from tests.harness.servers.valkey import Server


@dataclass
class Held:
    """A queue whose worker scores no row with the word ``hold``, and what it has claimed with it, until `go`.

    So a run with such a row is in progress for as long as a test wants, however fast the machine is.
    """

    server: Server
    model: Path
    file: Path

    def go(self) -> None:
        """Let the worker go on."""
        self.file.touch()


@pytest.fixture(scope="session")
def model_with_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose vocabulary has `MARKS`."""
    return make_bert(tmp_path_factory.mktemp("marks"), extra_words=MARKS)


@pytest.fixture
def held(server: Server, workers: StartWorker, model_with_marks: Path, tmp_path: Path) -> Held:
    """See `Held`."""
    environ = {"FORWARDS": str(tmp_path / "forwards"), "PYTHONPATH": str(Path(__file__).parents[2])}
    workers(worker_class="tests.harness.misbehaving.MisbehavingWorker", environ=environ)
    return Held(server, model_with_marks, tmp_path / "go")
