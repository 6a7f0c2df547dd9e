"""The registry over HTTP: for whom, and that an upload is a version or leaves nothing."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.types import Message

from rankmill.extensions.gateway import bodies
from rankmill.extensions.gateway.bodies import UploadedBody, uploaded
from rankmill.extensions.gateway.gateway import in_own_thread
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.registry.registry import Registry
from tests.harness.gateways import Reply, Running, running_gateway
from tests.harness.models.registries import archive, entry, put_version
from tests.harness.models.tiny import make_bert, put_weights
from tests.harness.processes import wait_for
from tests.harness.servers.valkey import Server
from tests.harness.tools import tool

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (
    (ROOT / "docs" / "guides" / "serve.md").read_text().partition("## The registry")[2].partition("\n## ")[0]
)
MODEL = "/v1/registry/reranker"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_bert(folder / f"model-{seed}", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def registry(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A registry with two versions of a model."""
    folder = tmp_path_factory.mktemp("registry")
    for model in models[:2]:
        put_version(folder, model, "reranker")
    return Registry(str(folder))


@pytest.fixture(scope="module")
def managing(
    registry: Registry, shared_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A gateway of this registry, without keys."""
    with gateway_of(registry, shared_server, tmp_path_factory.mktemp("managing")) as running:
        yield running


def gateway_of(
    registry: Registry, server: Server, folder: Path, code: int = 0
) -> AbstractContextManager[Running]:
    """A gateway whose temporary files are in ``tmp`` beside its log."""
    (folder / "tmp").mkdir()
    here = {
        "RANKMILL_REGISTRY": registry.url,
        "RANKMILL_GATEWAY_MODEL_GIB": "0.01",
        "TMPDIR": str(folder / "tmp"),
    }
    return running_gateway(server.url, folder, "--model", "demo", environ=here, code=code)


def put(gateway: Running, path: str, body: bytes, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return gateway.send(urllib.request.Request(gateway.url + path, body, named, method="PUT"))


def half(gateway: Running, path: str, body: bytes, **headers: str) -> socket.socket:
    """Begin an upload whose second half does not come."""
    address = urlsplit(gateway.url)
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    sender = socket.create_connection((address.hostname, address.port))
    sender.sendall(
        f"PUT {path} HTTP/1.1\r\nhost: localhost\r\n{named}content-length: {len(body)}\r\n\r\n".encode()
    )
    sender.sendall(body[: len(body) // 2])
    wait_for(lambda: any(each.stat().st_size for each in uploads(gateway, "*/*.*")))
    return sender


def order(gateway: Running, path: str, wanted: Any = None) -> Reply:
    """DELETE a path; or send an order to it: PUT to an alias, else POST."""
    raw = None if wanted is None else json.dumps(wanted).encode()
    method = "DELETE" if wanted is None else "POST" if path.endswith(("promote", "rollback")) else "PUT"
    kind = {"content-type": "application/json"}
    return gateway.send(urllib.request.Request(gateway.url + path, raw, kind, method=method))


def uploads(gateway: Running, below: str = "") -> list[Path]:
    """What uploads have left in the folder for temporary files."""
    return list((gateway.log.parent / "tmp").glob(f"rankmill-upload-*/{below}"))


def everything(registry: Registry) -> list[str]:
    return sorted(str(path) for path in Path(registry.url).rglob("*"))


@pytest.mark.slow
def test_the_lines_of_the_documentation(managing: Running, models: list[Path], tmp_path: Path) -> None:
    tool("curl", "curl")
    (tmp_path / "trained").symlink_to(models[2])
    (tmp_path / "pulled").mkdir()
    said = {}
    for line in re.findall(r"^(?:tar|curl) .*?(?=  +#|$)", GUIDE, re.M):
        command = line.replace("localhost:9809", managing.url)
        command = command.replace("curl ", "curl --silent --show-error --fail-with-body ")
        if "/promote" in line:  # it needs a worker: test_served_versions.py has one
            command = command.replace("/promote", "").replace("-X POST", "-X PUT")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, line + done.stdout + done.stderr
        said[line] = done.stdout
    pushed, listed, model, shown, *_, rolled, alias, _, removed = said.values()
    assert '"version":"v3"' in pushed
    assert '"family":"bert"' in pushed
    assert '"notes":"clicks of May"' in pushed
    assert '"by":"the gateway, without a key"' in pushed
    assert [f'"version":"v{number}"' in listed for number in (1, 2, 3)] == [True] * 3
    assert '"name":"reranker"' in model
    assert '"version":"v2"' in shown
    assert rolled == alias
    assert '"now":{"versions":{"v2":1.0}' in alias
    assert '"deleted":true' in removed
    assert len(said) == 12
    pulled, second = tmp_path / "pulled", models[1]
    assert {path.name for path in pulled.iterdir()} == {path.name for path in second.iterdir()}
    assert all(path.read_bytes() == (second / path.name).read_bytes() for path in pulled.iterdir())
    assert managing.get(f"{MODEL}/versions/v3").status == 404
    assert managing.get(f"{MODEL}/aliases/candidate").status == 404
    assert managing.get(f"{MODEL}/aliases/production").json["now"]["versions"] == {"v2": 1.0}
    assert not uploads(managing)


def test_the_same_model_is_the_same_version_and_another_needs_another_name(
    managing: Running, models: list[Path], registry: Registry, tmp_path: Path
) -> None:
    same = put(managing, f"{MODEL}/versions/v1", archive(models[0], below="model"))
    assert (same.status, same.json["before"], same.json["version"]) == (200, True, "v1")


def test_a_pulled_version_can_be_pushed_and_a_damaged_one_is_not_sent(
    managing: Running, registry: Registry, models: list[Path]
) -> None:
    with urllib.request.urlopen(f"{managing.url}{MODEL}/versions/v2/archive", timeout=60) as reply:
        whole = reply.read()
        assert int(reply.headers["content-length"]) == len(whole)
    assert put(managing, f"{MODEL}/versions/v2", whole).json["before"]
    assert managing.get(f"{MODEL}/versions/v7/archive").status == 404
    put_version(registry.url, models[0], "damaged")
    (config,) = Path(registry.url, "damaged").rglob("config.json")
    config.write_bytes(bytes(config.stat().st_size))
    damaged = managing.get("/v1/registry/damaged/versions/v1/archive")
    assert (damaged.status, "config.json" in damaged.json["message"]) == (503, True)
    assert not uploads(managing)


REFUSED = {
    "code": (entry("modeling.py", size=9), "modeling.py cannot be pushed: a registry holds no code"),
    "a pickle": (entry("sub/pytorch_model.bin", size=9), "a registry holds weights as *.safetensors"),
    "a way out": (entry("../outside.json"), "'../outside.json' is not a path inside a model's folder"),
    "a link": (entry("link.json", kind=tarfile.SYMTYPE, link="/etc/passwd"), "link.json is a link"),
    "twice": (entry("config.json", size=3), "config.json is twice in the archive"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_is_no_model_leaves_nothing(
    kind: str, managing: Running, models: list[Path], registry: Registry
) -> None:
    more, reason = REFUSED[kind]
    before = everything(registry)
    reply = put(managing, MODEL, archive(models[2], more))
    assert (reply.status, reply.headers["connection"]) == (400, "close")
    assert reason in reply.json["message"]
    assert "/tmp" not in reply.json["message"]
    assert everything(registry) == before
    assert not uploads(managing)


def test_what_is_too_large_is_not_taken(managing: Running, tmp_path: Path) -> None:
    with (tmp_path / "large.tar").open("wb") as large:
        large.truncate(11 << 20)
    command = [tool("curl", "curl"), "--silent", "--upload-file", str(large.name), managing.url + MODEL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the model is larger than 0.01 GiB" in done.stdout


def test_a_stream_is_taken_no_further_than_allowed() -> None:
    async def begin() -> list[str]:
        parts = [{"type": "http.request", "body": b"x" * 600, "more_body": True}] * 9

        async def receive() -> Message:
            return parts.pop()

        scope = {"type": "http", "headers": [], "method": "PUT", "path": "/"}
        body = UploadedBody(Request(scope, receive), 2000, "the model is larger than 2000 bytes")
        with pytest.raises(Refusal, match="larger than") as refused:
            await in_own_thread(lambda: [body.read(100) for _ in range(30)])
        return [refused.value.kind, str(len(parts))]

    assert asyncio.run(begin()) == ["too_large", "5"]


@pytest.mark.parametrize("kind", ["model", "file"])
def test_an_upload_of_a_byte_now_and_then_ends(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It began well."""
    monkeypatch.setattr(bodies, "_PACE_SECONDS", 0.5)
    monkeypatch.setattr(bodies, "_LEAST_SPEED", 10_000)
    head = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    received = 0

    async def receive() -> Message:
        nonlocal received
        received += 1
        if received > 4:
            await asyncio.sleep(0.01)
        body = head if received == 1 else b"x" * (100_000 if received <= 4 else 1)
        return {"type": "http.request", "body": body, "more_body": True}

    async def upload() -> None:
        headers = [(b"content-type", b"multipart/form-data; boundary=xx")]
        request = Request({"type": "http", "headers": headers, "method": "PUT", "path": "/"}, receive)
        if kind == "file":
            await uploaded(request, 10**9).__aenter__()
        body = UploadedBody(request, 10**9, "too large")
        await in_own_thread(lambda: [body.read(1_000_000) for _ in range(10_000)])

    with pytest.raises(Refusal, match="the body arrives too slowly") as refused:
        asyncio.run(upload())
    assert refused.value.kind == "slow"
    assert 4 < received < 100


def test_other_bodies_and_names_are_refused(
    managing: Running, models: list[Path], registry: Registry
) -> None:
    before, whole = everything(registry), archive(models[2])
    for path, body, reason in [
        (MODEL, b"", "this is not a tar archive"),
        (MODEL, whole[: len(whole) // 2], "this is not a tar archive, or only a part of one"),
        (MODEL, b"\x1f\x8b" + bytes(2000), "this is not a tar archive"),
        (MODEL, archive(ROOT / "docs" / "images"), "the model is not a model: there is no config.json"),
        ("/v1/registry/aliases", whole, "cannot be the name of a model"),
        ("/v1/registry/a%20b", whole, "cannot be the name of a model"),
        (f"{MODEL}/versions/a..b", whole, "cannot be the name of a version"),
    ]:
        reply = put(managing, path, body)
        assert reply.status == 400, path
        assert reason in reply.json["message"]
    for path, wanted, status in [
        (f"{MODEL}/aliases/live", {"version": "v9"}, 404),
        (f"{MODEL}/aliases/live", {"version": "v1", "splits": {}}, 400),
        (f"{MODEL}/aliases/live", {"version": "v1", "split": {"v1": 0.5}}, 400),
        (f"{MODEL}/aliases/v7", {"version": "v1"}, 409),
        (f"{MODEL}/aliases/live/rollback", {}, 404),
        (f"{MODEL}/aliases/live/promote", {"version": "v9", "wait_seconds": 1}, 404),
    ]:
        assert order(managing, path, wanted).status == status, path
    assert managing.post(f"{MODEL}/aliases/live/rollback", b"", content_type="text/plain").status == 415
    assert managing.get("/v1/registry/other").status == 404
    assert everything(registry) == before


def test_a_model_that_names_files_of_this_host_is_refused(
    managing: Running, models: list[Path], registry: Registry, tmp_path: Path
) -> None:
    """With the same words whether they are there or not."""
    before = everything(registry)
    for place in (models[1] / "model.safetensors", tmp_path / "gone.safetensors"):
        model = shutil.copytree(models[0], tmp_path / place.stem)
        index = put_weights(model, "one.safetensors").with_name("model.safetensors.index.json")
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": str(place)}}))
        reply = put(managing, MODEL, archive(model))
        said = f"model.safetensors.index.json names {str(place)!r}, which is not in its directory: "
        assert (reply.status, reply.json["message"].partition("copy")[0]) == (400, said)
    assert everything(registry) == before


def test_what_is_there_already_is_a_conflict(
    managing: Running, models: list[Path], registry: Registry
) -> None:
    for model in models[:2]:
        put_version(registry.url, model, "shop")
    first, second, live = (
        f"/v1/registry/shop/{each}" for each in ("versions/v1", "versions/v2", "aliases/live")
    )
    assert order(managing, live, {"version": "v1"}).status == 200
    refused = order(managing, first)
    assert (refused.status, "live stands for" in refused.json["message"]) == (409, True)
    assert order(managing, f"{live}/rollback", {}).status == 409
    named = put(managing, "/v1/registry/shop/versions/live", archive(models[0]))
    assert (named.status, named.json["message"].partition(";")[0]) == (
        409, "shop@live is an alias in the registry"
    )  # fmt: skip
    assert [order(managing, second).status for _ in range(2)] == [200, 404]
    gone = put(managing, second, archive(models[1]))
    assert (gone.status, gone.json["message"].partition(";")[0]) == (
        409, "shop@v2 was removed from the registry"
    )  # fmt: skip
    assert managing.get(f"{second}/archive").status == 404
    other = put(managing, first, archive(models[1]))
    assert (other.status, "a version never changes" in other.json["message"]) == (409, True)


def test_downloads_count_among_the_requests_of_a_key(
    registry: Registry, models: list[Path], server: Server, tmp_path: Path
) -> None:
    large = Path(shutil.copytree(models[0], tmp_path / "large"))
    (large / "words.txt").write_bytes(bytes(16 << 20))  # more than the buffers of a connection
    put_version(registry.url, large, "large")
    allowed = {"manage_models": True, "requests_at_once": 1, "pairs_per_minute": 1}
    mine = {"x-api-key": KeyStore(server.client).create("trainer", days=1, **allowed)[0]}
    path = "/v1/registry/large/versions/v1/archive"
    with gateway_of(registry, server, tmp_path) as gateway:
        address = urlsplit(gateway.url)
        with socket.create_connection((address.hostname, address.port)) as reader:
            reader.sendall(
                f"GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {mine['x-api-key']}\r\n\r\n".encode()
            )
            assert reader.recv(9) == b"HTTP/1.1 "
            refused = gateway.get(path, **mine)
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert "1 requests at once" in refused.json["message"]
        wait_for(lambda: not server.client.exists("rankmill:api-key-requests:trainer"))
        assert [gateway.get(path, **mine).status for _ in range(2)] == [200, 200]


def test_a_client_that_goes_away_leaves_nothing(
    managing: Running, models: list[Path], registry: Registry
) -> None:
    before = everything(registry)
    sender = half(managing, MODEL, archive(models[2]))
    second = put(managing, MODEL, b"")
    assert (second.status, second.headers["retry-after"]) == (429, "15")
    sender.close()
    wait_for(lambda: not uploads(managing))
    assert everything(registry) == before


def test_only_keys_that_manage_models_do_and_a_kill_leaves_nothing(
    registry: Registry, models: list[Path], server: Server, tmp_path: Path
) -> None:
    store = KeyStore(server.client)
    keys = {
        "shop": store.create("shop", days=1)[0],
        "boss": store.create("boss", days=1, admin=True)[0],
        "trainer": store.create("trainer", days=1, models=("reranker",), manage_models=True)[0],
    }
    before = everything(registry)
    with gateway_of(registry, server, tmp_path, code=-9) as gateway:
        for name, status in (("shop", 403), ("boss", 403), ("trainer", 200)):
            assert gateway.get(MODEL, **{"x-api-key": keys[name]}).status == status
        assert put(gateway, MODEL, archive(models[2])).status == 401
        assert put(gateway, MODEL, archive(models[2]), x_api_key=keys["shop"]).status == 403
        mine = {"x_api_key": keys["trainer"]}
        other = put(gateway, "/v1/registry/other", archive(models[2]), **mine)
        assert (other.status, "may not use the model 'other'" in other.json["message"]) == (403, True)
        half(gateway, MODEL, archive(models[2]), **mine)
        gateway.process.kill()
        gateway.process.wait()
    assert everything(registry) == before
