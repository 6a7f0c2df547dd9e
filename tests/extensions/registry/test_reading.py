"""A registry holds together on this host and on S3, whoever writes it and whatever is in it."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill.extensions.registry.documents import (
    Alias,
    Manifest,
    ModelFile,
    Reference,
    Target,
    check_name,
    content_of,
    parse_reference,
    target_of,
)
from rankmill.extensions.registry.folder import PIECE, RegistryFolder
from rankmill.extensions.registry.models import RegistryModels
from rankmill.extensions.registry.push import next_version
from rankmill.extensions.registry.registry import Registry, fetch_files, files_folder
from rankmill.jobs.contract.errors import ConfigError, InputError, RegistryAway, RegistryError
from rankmill.jobs.model_names import ModelNames, has_tag
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.testing import FakeClient, FakeWorkers
from tests.harness.models.registries import put_version
from tests.harness.servers.buckets import Bucket
from tests.harness.tools import needs_package

FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "1_Pooling/config.json": b"[]"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for path, content in FILES.items():
        file = tmp_path / "model" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return tmp_path / "model"


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return f"{bucket.url}/models"
    (tmp_path / "registry").mkdir()
    return (tmp_path / "registry").as_uri()


def names(registry: Path | None) -> ModelNames:
    """What a producer knows of a registry."""
    return ModelNames(
        load_settings({"registry": registry and str(registry)}, environ={}), lambda: [RegistryModels]
    )


def alias(registry: Registry, name: str, versions: dict[str, float], shadow: str | None = None) -> None:
    target = target_of(versions, shadow=shadow, by="a test", at=1.0)
    registry.write_alias(Reference("reranker", name), Alias(now=target))


def test_what_is_pushed_is_what_is_fetched(url: str, model: Path, tmp_path: Path) -> None:
    pushed = put_version(url, model, "reranker")
    registry = Registry(url)
    assert (str(pushed), registry.models(), registry.versions("reranker")) == (
        "reranker@v1",
        ["reranker"],
        ["v1"],
    )
    assert registry.manifest(Reference("reranker", "v1")) == pushed
    fetch_files(registry, pushed, tmp_path / "a", tmp_path / "parts")
    there = {
        path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*") if path.is_file()
    }
    assert {path: (tmp_path / "a" / path).read_bytes() for path in there} == FILES


def test_versions_are_numbered_and_the_same_model_is_the_same_version(url: str, model: Path) -> None:
    assert [put_version(url, model, "reranker").version for _ in range(2)] == ["v1", "v1"]
    (model / "config.json").write_bytes(b'{"a": 1}')
    assert put_version(url, model, "reranker").version == "v2"
    with pytest.raises(InputError, match="reranker@v1 is in the registry with other files"):
        put_version(url, model, "reranker", "v1")
    assert next_version(["v2", "v10", "a", "v1"]) == "v11"


def test_an_alias_is_resolved_to_its_version(url: str, model: Path) -> None:
    put_version(url, model, "reranker")
    registry = Registry(url)
    alias(registry, "production", {"v1": 1.0})
    alias(registry, "stable", {"v7": 1.0})
    for tag in ("v1", "production"):
        assert registry.resolve(Reference("reranker", tag)).only == "reranker@v1"
    assert sorted(registry.aliases("reranker")) == ["production", "stable"]
    with pytest.raises(RegistryError, match=r"stable in .* names v7, which is not a version"):
        registry.resolve(Reference("reranker", "stable"))
    with pytest.raises(InputError, match=r"has no reranker@v9; it has v1, production, stable"):
        registry.resolve(Reference("reranker", "v9"))


def test_two_writers_of_one_version_never_mix_their_files(url: str, tmp_path: Path) -> None:
    models = []
    for number in range(4):
        folder = tmp_path / f"model-{number}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes([number]) * 300_000)
        models.append(folder)

    def push(folder: Path) -> Manifest | InputError:
        try:
            return put_version(url, folder, "reranker", "v1")
        except InputError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(push, models))
    (winner,) = [each for each in found if isinstance(each, Manifest)]
    assert all("with other files" in str(each) for each in found if each is not winner)
    registry = Registry(url)
    assert registry.manifest(Reference("reranker", "v1")) == winner
    fetch_files(registry, winner, tmp_path / "fetched", tmp_path / "parts")


def test_a_version_is_visible_only_with_all_of_its_files(
    url: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload(folder: RegistryFolder, source: Path, *rest: object) -> None:
        if source.name.endswith("safetensors"):
            raise RegistryAway("away")
        real(folder, source, *rest)  # type: ignore[arg-type]

    real = RegistryFolder.upload
    monkeypatch.setattr(RegistryFolder, "upload", upload)
    with pytest.raises(RegistryAway):
        put_version(url, model, "reranker")
    registry = Registry(url)
    assert (registry.models(), registry.versions("reranker"), registry.taken("reranker")) == ([], [], ["v1"])
    with pytest.raises(InputError, match="has no reranker@v1; it has no model reranker"):
        registry.manifest(Reference("reranker", "v1"))
    uploaded: list[str] = []

    def rest_of_it(folder: RegistryFolder, source: Path, *rest: object) -> None:
        uploaded.append(source.name)
        real(folder, source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RegistryFolder, "upload", rest_of_it)
    assert put_version(url, model, "reranker").version == "v1"
    assert uploaded == ["model.safetensors"]


def test_a_removed_version_is_gone_and_its_name_is_not_used_again(url: str, model: Path) -> None:
    put_version(url, model, "reranker")
    registry = Registry(url)
    registry.remove(Reference("reranker", "v1"), b"{}")
    assert registry.versions("reranker") == []
    assert registry.folder.sizes("reranker") == {"v1/removed.json": 2}
    with pytest.raises(InputError, match="reranker@v1 was removed"):
        registry.resolve(Reference("reranker", "v1"))
    with pytest.raises(InputError, match="its name is not used again"):
        put_version(url, model, "reranker", "v1")
    assert put_version(url, model, "reranker").version == "v2"


def test_a_wrong_checksum_and_a_file_that_is_short_are_refused(tmp_path: Path, model: Path) -> None:
    pushed = put_version(tmp_path, model, "reranker")
    weights = tmp_path / "reranker" / "v1" / files_folder(pushed.content) / "model.safetensors"
    for damaged in (b"Weights" * 100, b"weights", b""):
        weights.write_bytes(damaged)
        with pytest.raises(RegistryError, match=r"model.safetensors of reranker@v1 .*\(another checksum"):
            fetch_files(Registry(str(tmp_path)), pushed, tmp_path / "a", tmp_path / "parts")
        assert not (tmp_path / "a" / "model.safetensors").exists()
    weights.unlink()
    with pytest.raises(RegistryError, match="is not there"):
        fetch_files(Registry(str(tmp_path)), pushed, tmp_path / "a", tmp_path / "parts")


def test_a_fetch_continues_where_it_ended(tmp_path: Path, model: Path) -> None:
    content = bytes(range(256)) * (PIECE // 128)
    (model / "model.safetensors").write_bytes(content)
    pushed = put_version(tmp_path, model, "reranker")
    digest = next(file.sha256 for file in pushed.files if file.path == "model.safetensors")
    registry, read = Registry(str(tmp_path)), []
    real = registry.folder.read_piece

    def read_piece(start: int, end: int, *path: str) -> bytes:
        if path[-1] == "model.safetensors":
            read.append(start)
        return real(start, end, *path)

    registry.folder.read_piece = read_piece  # type: ignore[method-assign]
    for number, (left, reads) in enumerate([(content[:1000], [1000, 1000 + PIECE]), (b"x" * 1000, None)]):
        parts = tmp_path / f"parts-{number}"
        parts.mkdir()
        (parts / digest).write_bytes(left)
        read.clear()
        fetch_files(registry, pushed, tmp_path / f"a-{number}", parts)
        assert reads is None or read == reads
        assert (tmp_path / f"a-{number}" / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"format": 1}', b"\xff", b"null"],
)
def test_damaged_documents_are_one_line(tmp_path: Path, model: Path, damage: bytes) -> None:
    put_version(tmp_path, model, "reranker")
    registry = Registry(str(tmp_path))
    (tmp_path / "reranker" / "v1" / "manifest.json").write_bytes(damage)
    with pytest.raises(RegistryError, match=r"the manifest of reranker@v1 .* is damaged") as found:
        registry.manifest(Reference("reranker", "v1"))
    assert "\n" not in str(found.value)
    (tmp_path / "reranker" / "aliases").mkdir()
    (tmp_path / "reranker" / "aliases" / "production.json").write_bytes(damage)
    with pytest.raises(RegistryError, match=r"alias reranker@production .* is damaged"):
        registry.resolve(Reference("reranker", "production"))


def test_a_manifest_of_an_earlier_version_is_read(tmp_path: Path, model: Path) -> None:
    pushed = put_version(tmp_path, model, "reranker")
    file = tmp_path / "reranker" / "v1" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "precision": None}))
    assert Registry(str(tmp_path)).manifest(Reference("reranker", "v1")) == pushed


PATHS = st.one_of(
    st.sampled_from(
        ["../a", "/etc/passwd", "a/../b", "a//b", ".", "", "a\\b", "a\0b", "a\nb", "a/./b", "~/a/.."]
    ),
    st.text(max_size=20),
)


@given(PATHS)
def test_no_path_of_a_manifest_leads_out_of_its_folder(path: str) -> None:
    try:
        file = ModelFile(path=path, bytes=1, sha256="0" * 64)
    except ValueError:
        return
    inside = Path("/cache") / "model"
    assert (inside / file.path).is_relative_to(inside)
    assert ".." not in (inside / file.path).parts


@given(st.text(max_size=40))
def test_a_reference_is_two_names_or_none_or_refused(text: str) -> None:
    if not has_tag(text):
        return
    try:
        found = parse_reference(text)
    except InputError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "\n" not in refused
        return
    assert str(found) == text
    assert not {"/", "\\", "@", " ", "\n"} & {*found.name, *found.tag}
    assert ".." not in text


@pytest.mark.parametrize("name", ["", "..", "a/b", "a..b", ".a", "a" * 65, "a b", "aliases", "a\n", "ä"])
def test_names_that_cannot_be_in_a_registry(name: str) -> None:
    with pytest.raises(InputError, match="cannot be the name of a model"):
        check_name(name, "a model")


def test_folders_and_models_of_the_hub_are_no_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b@c").mkdir(parents=True)
    for name in ("demo", "org/model", "/models/a@b", "./a@b", "~/a@b", "a/b@c"):
        assert not has_tag(name)


@pytest.mark.parametrize(
    ("versions", "shadow", "why"),
    [
        ({"v1": 0.5}, None, "do not add up to 1"),
        ({"v1": 1.0}, "v1", "cannot be both"),
        ({"../v1": 1.0}, None, "cannot be the name"),
        ({"v1": 1.0}, "a/b", "cannot be the name"),
        ({}, None, "at least 1"),
    ],
)
def test_targets_that_an_alias_cannot_have(versions: dict[str, float], shadow: str | None, why: str) -> None:
    with pytest.raises(InputError, match=why):
        target_of(versions, shadow=shadow, by="", at=0)


def test_shares_are_shown_as_they_are() -> None:
    target = target_of({"v1": 0.897, "v2": 0.1, "v3": 0.003}, shadow="v4", by="", at=0)
    assert str(target) == "v1 89.7%, v2 10%, v3 0.3%; v4 in its shadow"


def test_an_alias_remembers_what_it_stood_for() -> None:
    targets = [Target(versions={f"v{n}": 1.0}, by="", at=n) for n in range(30)]
    alias = Alias(now=targets[0])
    for target in targets[1:]:
        alias = alias.then(target)
    assert [next(iter(each.versions)) for each in (alias.now, *alias.before)] == [
        f"v{n}" for n in range(29, 8, -1)
    ]
    again = alias.then(targets[-1].model_copy(update={"by": "a job that runs twice", "at": 99}))
    assert (again.now.at, again.before) == (99, alias.before)


def test_a_registry_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_package("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for url, why in [
        (str(tmp_path / "nowhere"), "is not there: make the folder"),
        ("s3://bucket/models", "cannot be used: .*127.0.0.1:1"),
        ("gopher://a", "cannot be used: .*gopher"),
    ]:
        with pytest.raises(RegistryAway, match=why) as found:
            Registry(url).models()
        assert "\n" not in str(found.value)


def test_an_alias_keeps_its_version_while_the_registry_is_away(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "registry"
    url.mkdir()
    put_version(url, model, "reranker")
    alias(Registry(str(url)), "production", {"v1": 1.0})
    known = names(url)
    assert known.pin("reranker@production") == "reranker@v1"
    monkeypatch.setattr(system, "monotonic", lambda at=time.monotonic: at() + 60)
    shutil.rmtree(url)
    assert known.pin("reranker@production") == "reranker@v1"
    assert names(url).pin("reranker@v3") == "reranker@v3"  # workers may have it
    assert names(None).pin("reranker@v3") == "reranker@v3"
    with pytest.raises(RegistryAway, match="is not there"):
        names(url).pin("reranker@production")
    with pytest.raises(ConfigError, match=r"set RANKMILL_REGISTRY, or write \./reranker@production"):
        names(None).pin("reranker@production")


def test_an_alias_that_is_split_names_its_versions(tmp_path: Path, model: Path) -> None:
    put_version(tmp_path, model, "reranker", "v1")
    put_version(tmp_path, model, "reranker", "v2")
    alias(Registry(str(tmp_path)), "production", {"v1": 0.1, "v2": 0.9})
    with pytest.raises(
        InputError, match=r"several versions \(reranker@v1, reranker@v2\); name one, as reranker@v2"
    ):
        names(tmp_path).pin("reranker@production")


def test_the_revision_of_the_settings_is_that_of_the_version_of_their_alias(
    tmp_path: Path, model: Path
) -> None:
    put_version(tmp_path, model, "reranker")
    alias(Registry(str(tmp_path)), "production", {"v1": 1.0})
    workers, options = FakeWorkers(), {"registry": str(tmp_path), "model": "reranker@production"}
    client = FakeClient(fake_workers=workers, settings=load_settings({**options, "revision": "mine"}))
    client.score([("what", "a cat")])
    (run,) = workers.runs
    assert (run.asked.spec.model, run.asked.spec.revision) == ("reranker@v1", "mine")


def test_a_submitted_run_of_several_models_has_the_revision_of_none(tmp_path: Path, model: Path) -> None:
    """Its runner finds out what they stand for; the content of the client's own model is not theirs."""
    for name in ("reranker", "a", "b"):
        put_version(tmp_path, model, name)
    settings = load_settings({"registry": str(tmp_path), "model": "reranker@v1"})
    client, known = FakeClient(settings=settings), names(tmp_path).choice("reranker@v1")
    alone = client.submit_file("in.csv", "out.csv").status().order.spec
    several = client.submit_file("in.csv", "out.csv", models=("a@v1", "b@v1")).status().order.spec
    assert known
    assert (alone.model, alone.revision) == ("reranker@v1", known.content)
    assert (several.model, several.revision) == ("a@v1", None)


def test_the_content_says_nothing_of_who_and_when(tmp_path: Path, model: Path) -> None:
    pushed = put_version(tmp_path, model, "reranker")
    assert pushed.content == content_of(reversed(pushed.files))
    raw = json.loads(pushed.written())
    raw["files"][0]["bytes"] += 1
    with pytest.raises(RegistryError, match="its digest is not that of its list of files"):
        Manifest.read(json.dumps(raw).encode(), "it")
    with pytest.raises(RegistryError, match="it has format 2, this release reads 1: use the release"):
        Manifest.read(json.dumps({**raw, "format": 2, "new": 1}).encode(), "it")
