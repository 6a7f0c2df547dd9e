"""A version of a registry is fetched once for a host, verified, and removed when there is no room."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from rankmill.extensions.registry.documents import Manifest, Reference
from rankmill.extensions.registry.push import pull
from rankmill.extensions.registry.registry import Registry, fetch_files, files_folder
from rankmill.jobs.contract.errors import InputError, WorkerError
from rankmill.jobs.model_files import model_files
from rankmill.jobs.model_names import ModelCopy
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.models.sources import ModelCopies
from tests.harness.environ import ENVIRON
from tests.harness.models.registries import put_version
from tests.harness.preloaded import PreloadedProcess
from tests.harness.servers.disks import resize, small_disk

V1, V2 = "reranker@v1", "reranker@v2"
SIZE = 100_000
FILES = {"config.json", "model.safetensors"}

DIES = """
import os, signal, sys
from pathlib import Path
from rankmill.jobs.system import system
{setup}
left, real = int(sys.argv[1]), os.fsync
def fsync(file):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(file)
os.fsync = system.fsync = fsync
{work}
"""
"""A process that kills itself at the n-th time that it syncs a file."""


def dies(number: int, setup: str, work: str) -> bool:
    """Whether the process died at its n-th sync; it ends well if it makes fewer."""
    code = DIES.format(setup=setup, work=work).replace("sys.argv[1]", str(number))
    root = Path(__file__).parents[3]
    process: subprocess.Popen[bytes] = PreloadedProcess(["python", "-c", code], cwd=root, env=ENVIRON)
    assert process.wait(timeout=60) in {0, -signal.SIGKILL}
    return process.returncode != 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"a" * SIZE)
    return folder


@pytest.fixture
def registry(tmp_path: Path, model: Path) -> Path:
    """A registry with v1 and v2."""
    folder = tmp_path / "registry"
    folder.mkdir()
    put_version(folder, model, "reranker")
    (model / "model.safetensors").write_bytes(b"b" * SIZE)
    put_version(folder, model, "reranker")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Host:
    """A worker's host, whose settings name a cache folder, a registry and the most bytes of the cache."""

    def __init__(self, cache: Path, registry: Path | None, limit: int | None = None) -> None:
        cache_gib = None if limit is None else limit / 2**30
        named = {"cache_dir": str(cache), "registry": registry and str(registry), "cache_gib": cache_gib}
        self.copies = ModelCopies(load_settings(named, environ={}))

    def get(self, model: str, content: str | None) -> ModelCopy:
        """A worker's copy of a version."""
        found = self.copies.find(model, content)
        assert found
        return found


def release(version: ModelCopy) -> None:
    """Let others remove a version."""
    assert version.held
    version.held.close()


def here(cache: Path) -> list[str]:
    """Versions in the cache."""
    return sorted(path.parent.name for path in cache.glob("registry/*/*/manifest.json"))


def test_what_is_in_the_cache_needs_no_registry(registry: Path, cache: Path) -> None:
    version = Host(cache, registry).get(V1, None)
    assert (version.folder / "model.safetensors").read_bytes() == b"a" * SIZE
    shutil.rmtree(registry)
    for away in (registry, None):
        again = Host(cache, away).get(V1, version.content)
        assert again.folder == version.folder
    with pytest.raises(
        WorkerError, match=r"reranker@v2 is not in this host's cache, and the registry .* is not there"
    ):
        Host(cache, registry).get(V2, None)
    with pytest.raises(WorkerError, match="has no RANKMILL_REGISTRY"):
        Host(cache, None).get(V2, None)


def test_what_the_run_has_begun_with_is_what_it_goes_on_with(registry: Path, cache: Path) -> None:
    with pytest.raises(WorkerError, match=r"has content [0-9a-f]{12}, and the run wants 0{12}"):
        Host(cache, registry).get(V1, "0" * 64)


def test_another_registry_s_version_of_the_name_is_not_taken_for_this_one_s(
    registry: Path, cache: Path, model: Path, tmp_path: Path
) -> None:
    first = Host(cache, registry).get(V1, None)
    other = tmp_path / "other"
    other.mkdir()
    (model / "model.safetensors").write_bytes(b"c" * SIZE)
    put_version(other, model, "reranker")
    with pytest.raises(WorkerError, match=rf"uses content {first.content[:12]} of this name: wait"):
        Host(cache, other).get(V1, None)
    assert (first.folder / "model.safetensors").read_bytes() == b"a" * SIZE
    release(first)
    second = Host(cache, other).get(V1, None)
    assert (second.folder / "model.safetensors").read_bytes() == b"c" * SIZE
    release(second)
    assert Host(cache, registry).get(V1, first.content).content == first.content


def test_what_a_process_with_another_registry_has_fetched_meanwhile_is_refused(
    registry: Path, cache: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (model / "model.safetensors").write_bytes(b"c" * SIZE)
    put_version(other, model, "reranker")
    asked = Registry.manifest

    def and_then_another_fetches(self: Registry, reference: Reference) -> Manifest:
        manifest = asked(self, reference)
        if not here(cache):
            monkeypatch.setattr(Registry, "manifest", asked)
            Host(cache, other).get(V1, None)
        return manifest

    monkeypatch.setattr(Registry, "manifest", and_then_another_fetches)
    with pytest.raises(WorkerError, match="is RANKMILL_REGISTRY the same everywhere"):
        Host(cache, registry).get(V1, None)


def test_a_damaged_registry_leaves_nothing_that_could_be_loaded(registry: Path, cache: Path) -> None:
    (files,) = (registry / "reranker" / "v1").glob("files-*")
    (files / "model.safetensors").write_bytes(b"x" * SIZE)
    with pytest.raises(WorkerError, match="another checksum"):
        Host(cache, registry).get(V1, None)
    assert here(cache) == []
    with pytest.raises(WorkerError, match="has no reranker@v3"):
        Host(cache, registry).get("reranker@v3", None)


def test_a_file_that_the_cache_lost_is_fetched_again(registry: Path, cache: Path) -> None:
    first = Host(cache, registry).get(V1, None)
    release(first)
    (first.folder / "model.safetensors").write_bytes(b"a")
    again = Host(cache, registry).get(V1, None)
    assert (again.folder / "model.safetensors").read_bytes() == b"a" * SIZE
    (cache / "registry" / "reranker" / "v1" / "manifest.json").write_text("{")
    assert Host(cache, registry).get(V1, None).content == first.content


@pytest.mark.parametrize("planted", ["model.safetensors", "rankmill_new.json", "1_Dense/config.json"])
def test_what_was_planted_in_the_cache_is_not_loaded(
    registry: Path, cache: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Host(cache, registry).get(V1, None)
    release(first)
    (first.folder / planted).parent.mkdir(exist_ok=True)
    (first.folder / planted).write_bytes(b"b" * SIZE)  # of the same size, where there was one
    again = Host(cache, registry).get(V1, first.content)
    assert f"is fetched again: {planted} is not what was kept there" in caplog.text
    assert set(model_files(again.folder)) == FILES
    assert (again.folder / "model.safetensors").read_bytes() == b"a" * SIZE
    (first.folder / planted).write_bytes(b"b" * SIZE)
    shutil.rmtree(registry)
    with pytest.raises(WorkerError, match="is not in this host's cache"):
        Host(cache, registry).get(V1, first.content)


@pytest.mark.parametrize("folder", ["", "registry", "registry/reranker/v1", "registry/reranker/v1/model"])
def test_a_folder_that_everybody_can_write_is_refused(registry: Path, cache: Path, folder: str) -> None:
    release(Host(cache, registry).get(V1, None))
    (cache / folder).chmod(0o777)
    with pytest.raises(WorkerError, match=f"{cache / folder} can be written by everybody, and what lies"):
        Host(cache, registry).get(V1, None)


def test_the_version_unused_for_longest_makes_room_unless_it_is_in_use(registry: Path, cache: Path) -> None:
    limit = 2 * SIZE - 1
    versions = Host(cache, registry, limit)
    first = versions.get(V1, None)
    with pytest.raises(WorkerError, match=r"reranker@v2 has 0.00 GiB .* raise cache_gib"):
        versions.get(V2, None)
    assert here(cache) == ["v1"]
    release(first)
    second = versions.get(V2, None)
    assert here(cache) == ["v2"]
    release(second)
    with pytest.raises(WorkerError, match="raise cache_gib"):
        Host(cache, registry, SIZE // 2).get(V1, None)
    assert here(cache) == ["v2"]  # which would have been removed in vain


def test_a_full_disk_is_one_line_and_leaves_nothing_half_there(registry: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as cache:
        with pytest.raises(
            WorkerError, match=r"reranker@v1 cannot be kept .* is full; free some space"
        ) as found:
            Host(cache, registry).get(V1, None)
        assert "\n" not in str(found.value)
        assert [path for path in cache.rglob("*") if path.is_file() and path.parent.name != ".locks"] == []
        resize(cache, "1m")
        version = Host(cache, registry).get(V1, None)
        assert (version.folder / "model.safetensors").read_bytes() == b"a" * SIZE
        release(version)


def test_killed_while_it_fetches_the_next_goes_on(registry: Path, cache: Path) -> None:
    setup = "from tests.extensions.registry.test_versions import Host"
    work = f"Host(Path({str(cache)!r}), Path({str(registry)!r})).get('reranker@v1', None)"
    kills = 0
    while dies(kills + 1, setup, work):
        kills += 1
        assert here(cache) == []
    assert kills >= 2  # what is there is not fetched again, so it syncs less each time
    version = Host(cache, None).get(V1, None)
    assert (version.folder / "model.safetensors").read_bytes() == b"a" * SIZE
    assert not (version.folder.parent / ".fetching").exists()


def test_killed_while_it_pushes_the_next_goes_on(tmp_path: Path, model: Path) -> None:
    url = tmp_path / "empty"
    url.mkdir()
    setup = "from tests.harness.models.registries import put_version"
    kills = 0
    while dies(kills + 1, setup, f"put_version({str(url)!r}, Path({str(model)!r}), 'reranker')"):
        kills += 1
        manifests = list(url.rglob("manifest.json"))
        assert len(manifests) <= 1
        if manifests:  # it died after the version was made visible, which is whole then
            break
    assert kills >= 3  # what is there is not pushed again, so it syncs less each time
    pushed = put_version(url, model, "reranker")
    assert pushed.version == "v1"
    fetch_files(Registry(str(url)), pushed, tmp_path / "whole", tmp_path / "parts")
    files = url / "reranker" / "v1" / files_folder(pushed.content)
    assert {path.name for path in files.iterdir() if not path.name.startswith(".")} == FILES


def test_killed_while_it_pulls_the_next_goes_on(registry: Path, tmp_path: Path) -> None:
    target = tmp_path / "pulled"
    setup = (
        "from rankmill.extensions.registry.push import pull\n"
        "from rankmill.extensions.registry.registry import Registry\n"
        "from rankmill.extensions.registry.documents import Reference\n"
        f"registry = Registry({str(registry)!r})\nmanifest = registry.manifest(Reference('reranker', 'v1'))"
    )
    kills = 0
    while dies(kills + 1, setup, f"pull(registry, manifest, Path({str(target)!r}))"):
        kills += 1
        assert not target.exists()
    assert kills >= 1
    assert (target / "model.safetensors").read_bytes() == b"a" * SIZE
    assert not list(tmp_path.glob(".pulled*"))


def test_a_version_is_pulled_to_what_a_link_names_and_never_over_the_working_directory(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Registry(str(registry))
    manifest = store.manifest(Reference("reranker", "v1"))
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    pull(store, manifest, tmp_path / "link")
    assert (tmp_path / "disk" / "model.safetensors").read_bytes() == b"a" * SIZE
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="name a folder that does not exist"):
        pull(store, manifest, Path())
    assert not list(tmp_path.glob(".here*"))


def test_a_version_is_not_fetched_for_a_folder_that_is_mounted(registry: Path, tmp_path: Path) -> None:
    store = Registry(str(registry))
    manifest = store.manifest(Reference("reranker", "v1"))
    with small_disk(tmp_path / "disk", "64k") as disk, pytest.raises(InputError, match="exists already"):
        pull(store, manifest, disk)
