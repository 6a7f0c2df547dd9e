"""Models with names of their own: any package can add them, and the core is whole without."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from rankmill import AsyncClient, Client, plugins
from rankmill.jobs.cache import KeptFolder, temporary_folder
from rankmill.jobs.contract.errors import ConfigError, RegistryAway, WorkerError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.model_files import model_content
from rankmill.jobs.model_names import CacheRoom, Choice, ModelCopy, ModelNames
from rankmill.jobs.runtime.settings import WorkerSettings, load_settings
from rankmill.jobs.system import system
from rankmill.score.score_file import score_file
from rankmill.workers.models.loading import load
from rankmill.workers.models.sources import ModelCopies
from tests.conftest import Server, StartWorker
from tests.harness.alone import leave_alone

PAIR = ("how far", "a big cat")
SIZE = 100_000


class Zoo:
    """A stranger's models: zoo:NAME is zoo:NAME-2 now, whose files are in the folder of that name."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.asked: list[str] = []
        self.is_away = False

    def owns(self, model: str) -> bool:
        return model.startswith("zoo:")

    def choice(self, model: str) -> Choice:
        self.asked.append(threading.current_thread().name)
        if self.is_away:
            raise RegistryAway("the zoo is closed")
        return Choice(model, {f"{model}-2": 1.0})

    def copy(self, model: str, content: str | None, cache: CacheRoom) -> ModelCopy:
        folder = cache.folder / "zoo" / model.removeprefix("zoo:")
        return ModelCopy(folder, model_content(folder))

    def kept(self, cache: Path) -> Iterable[KeptFolder]:
        return map(KeptFolder, (cache / "zoo").iterdir())


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    plugins._named.cache_clear()


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with that seam is installed."""
    added = EntryPoint("zoo", f"{__name__}:Zoo", "rankmill.models")
    plugins._named.cache_clear()

    def with_zoo(group: str) -> list[EntryPoint]:
        return [*entry_points(group=group), *([added] if group == added.group else [])]

    monkeypatch.setattr(plugins, "entry_points", with_zoo)


def zoo_of(names: ModelNames) -> Zoo:
    return next(owner for owner in names.owners if isinstance(owner, Zoo))


def test_without_extensions_models_are_scored_and_a_name_is_one_line(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_alone(monkeypatch)
    workers(worker_class="tests.harness.alone.LonelyWorker")
    settings = load_settings({"redis_url": server.url, "model": str(tiny_model), "precision": "fp32"})
    client = Client(settings=settings)
    (score,) = client.score([PAIR])
    (tmp_path / "pairs.csv").write_text("query,passage\n" + ",".join(PAIR) + "\n")
    request = FileRequest(inputs=(str(tmp_path / "pairs.csv"),), output=str(tmp_path / "scores.csv"))
    assert score_file(request, settings).rows == 1
    assert float((tmp_path / "scores.csv").read_text().split(",")[-1]) == pytest.approx(score, abs=1e-5)

    line = r"no installed package knows such names: install .* or write \./reranker@live for a folder"
    named = settings.model_copy(update={"model": "reranker@live"})
    tries: list[Callable[[], object]] = [
        lambda: client.score([PAIR], model="reranker@live"),
        lambda: score_file(request.model_copy(update={"force": True}), named),
    ]
    for each in tries:
        with pytest.raises(ConfigError, match=line) as told:
            each()
        assert "\n" not in str(told.value)
    with pytest.raises(WorkerError, match=line):
        load(named.spec(), "cpu", "torch", str(tmp_path / "cache"), ModelCopies(named))


@pytest.mark.usefixtures("zoo")
def test_a_package_adds_names_and_where_their_files_are(tiny_model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "zoo").mkdir(parents=True)
    for name in ("cat-1", "cat-2"):
        (cache / "zoo" / name).symlink_to(tiny_model)
    copies = ModelCopies(load_settings({"cache_dir": str(cache)}, environ={}))
    spec = copies.pinned(ScoreSpec(model="zoo:cat", precision="fp32"))
    assert spec.model == "zoo:cat-2"
    loaded = load(spec, "cpu", "torch", str(cache), copies)
    assert (loaded.source, loaded.revision) == (cache / "zoo" / "cat-2", model_content(tiny_model))


@pytest.mark.usefixtures("zoo")
def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    for number, kind in enumerate(["openvino/a", "onnx/b", "zoo/cat-1", "openvino/.making-c", "zoo/cat-2"]):
        folder = tmp_path / kind
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"x" * SIZE)
        at = time.time() - 1000 + number
        os.utime(folder, (at, at))
    (tmp_path / "speeds").mkdir()
    (tmp_path / "speeds" / "a.json").write_bytes(b"x" * SIZE)

    def copies(limit: int | None) -> ModelCopies:
        cache_gib = None if limit is None else limit / 2**30
        return ModelCopies(load_settings({"cache_dir": str(tmp_path), "cache_gib": cache_gib}, environ={}))

    def left() -> list[str]:
        return sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("model.bin"))

    assert copies(None).make_room() == 0
    assert copies(3 * SIZE).make_room() == 0
    assert left() == ["openvino/.making-c", "zoo/cat-1", "zoo/cat-2"]
    assert copies(2 * SIZE).make_room(3 * SIZE) == SIZE
    assert len(left()) == 3  # which would have been removed in vain
    assert copies(2 * SIZE).make_room(SIZE, keep=tmp_path / "zoo" / "cat-1") == 0
    assert left() == ["zoo/cat-1", "zoo/cat-2"]
    assert copies(2 * SIZE).make_room(2 * SIZE) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.json"]


def test_a_conversion_that_another_worker_is_writing_makes_no_room(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    copies = ModelCopies(load_settings({"cache_dir": str(tmp_path), "cache_gib": 1 / 2**30}, environ={}))
    with temporary_folder(".making-", tmp_path / "onnx") as making:
        (making / "model.onnx").write_bytes(b"x" * SIZE)
        assert copies.make_room() == SIZE - 1
        assert (making / "model.onnx").exists()


@pytest.mark.usefixtures("zoo")
def test_an_answer_is_asked_for_once_and_outlives_who_gave_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ModelNames(load_settings(environ={}), lambda: plugins.load_all("rankmill.models"))
    assert [names.pin(model) for model in ("demo", "org/zoo", "./zoo:cat")] == [
        "demo",
        "org/zoo",
        "./zoo:cat",
    ]
    assert "owners" not in vars(names)  # no extension is imported for these
    assert [names.pin("zoo:cat") for _ in range(3)] == ["zoo:cat-2"] * 3
    owner = zoo_of(names)
    assert len(owner.asked) == 1
    owner.is_away, at = True, system.monotonic()
    monkeypatch.setattr(system, "monotonic", lambda: at + 60)
    assert names.pin("zoo:cat") == "zoo:cat-2"
    assert "the zoo is closed; zoo:cat stays what it was" in caplog.text
    with pytest.raises(RegistryAway, match="the zoo is closed"):
        names.pin("zoo:king")


@pytest.mark.usefixtures("zoo")
def test_a_known_name_waits_for_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop takes a known answer without a thread, and stood still while a thread asked."""
    names = ModelNames(load_settings(environ={}), lambda: plugins.load_all("rankmill.models"))
    assert names.pin("zoo:cat") == "zoo:cat-2"
    owner, asked, go = zoo_of(names), threading.Event(), threading.Event()

    def choice(model: str) -> Choice:
        asked.set()
        go.wait(60)
        return Choice(model, {model: 1.0})

    monkeypatch.setattr(owner, "choice", choice)
    found: list[str] = []
    slow = threading.Thread(target=names.pin, args=("zoo:king",))
    known = threading.Thread(target=lambda: found.append(names.pin("zoo:cat")))
    slow.start()
    assert asked.wait(60)
    known.start()
    known.join(30)
    answered = found[:]
    go.set()
    slow.join(60)
    assert answered == ["zoo:cat-2"]


@pytest.mark.usefixtures("zoo")
def test_a_loop_asks_in_a_thread_and_what_is_known_costs_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    real = asyncio.to_thread

    async def to_thread(*call: object) -> object:
        begun.append(call)
        return await real(*call)  # type: ignore[arg-type]

    async def submit() -> None:
        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        async with AsyncClient(server.url, model="zoo:cat") as client:
            for _ in range(3):
                run = await client.submit([PAIR])
                assert run.model == "zoo:cat-2"
                await run.cancel()
            asked = zoo_of(client._client._names).asked
            assert len(begun) == len(asked) == 1
            assert asked != [threading.main_thread().name]
            await client.submit([PAIR], model="demo")

    asyncio.run(submit())
    assert len(begun) == 1


def test_while_one_thread_asks_again_others_use_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_answer = threading.Event(), threading.Event()
    in_time: list[bool] = []

    class SlowZoo(Zoo):
        def choice(self, model: str) -> Choice:
            begun.set()
            in_time.append(may_answer.wait(30))
            return super().choice(model)

    names = ModelNames(load_settings(environ={}), lambda: [SlowZoo])
    may_answer.set()
    assert names.pin("zoo:far") == "zoo:far-2"
    may_answer.clear()
    begun.clear()
    at = system.monotonic()
    monkeypatch.setattr(system, "monotonic", lambda: at + 60)
    asking = threading.Thread(target=names.pin, args=("zoo:far",))
    asking.start()
    assert begun.wait(30)
    assert names.pin("zoo:far") == "zoo:far-2"
    may_answer.set()
    asking.join()
    assert in_time == [True, True]
