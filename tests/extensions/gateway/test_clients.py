"""Clients of other rerank services, as PyPI has them, against a running gateway."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extensions.gateway import real_clients
from tests.harness.gateways import Running, running_gateway
from tests.harness.models.registries import put_version
from tests.harness.servers.valkey import Server
from tests.harness.tools import slow_but

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"


@pytest.mark.parametrize("name", slow_but(["cohere_v1", "cohere_v2", "tei_client"], "cohere_v2"))
def test_a_client_finds_the_best_text(gateway: Running, name: str) -> None:
    # In a process of its own: tei_client and rankmill's own gRPC module both have the package tei.v1.
    code = f"from tests.extensions.gateway import real_clients; print(real_clients.{name}({gateway.url!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.long
def test_every_client_finds_the_best_text(gateway: Running) -> None:
    if not CLIENTS.exists():
        pytest.skip("make clients makes the environment")
    done = subprocess.run(
        [CLIENTS, "-P", real_clients.__file__, gateway.url],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    names = [client.__name__ for client in real_clients.CLIENTS]
    found = [line for line in done.stdout.splitlines() if line.split(" ")[0] in names]
    assert found == [f"{name} 1" for name in names], done.stdout + done.stderr


@pytest.mark.slow
def test_nothing_in_the_openapi_document_ends_in_a_server_error(gateway: Running, tmp_path: Path) -> None:
    paths = "^/((v1/|v2/)?rerank|score|predict|infinity/rerank)$"
    done = schemathesis(gateway, tmp_path, 4, "--phases", "fuzzing", "--include-path-regex", paths)
    assert "Tested: 6" in done


PIECES = {
    "files": "^/v1/(files|batches)",
    "registry": "^/v1/registry",
    "prefixes": "^/(tei|cohere|jina|vllm)/",
}
"""Some paths of the document; all others are one piece more."""

SLOW = "/v1/cache/|/events$|/promote$"
"""Orders to workers wait for heartbeats, up to a minute each; events last as long as their batch."""

PUSHES = ("put_v1_registry_name", "put_v1_registry_name_versions_version")
"""Operations that take a tar archive, which schemathesis does not make; test_unpacking.py does."""


@pytest.fixture(scope="module")
def whole(
    shared_queue: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A gateway that has every path: it keeps files, and has a registry with a model."""
    place = tmp_path_factory.mktemp("whole")
    for name in ("files", "registry"):
        (place / name).mkdir()
    put_version(place / "registry", tiny_model, "0")
    environ = {"RANKMILL_GATEWAY_FILES": str(place / "files"), "RANKMILL_REGISTRY": str(place / "registry")}
    with running_gateway(shared_queue.url, place, "--model", "demo", environ=environ) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("piece", [*PIECES, "others"])
def test_every_path_does_what_the_openapi_document_says(whole: Running, tmp_path: Path, piece: str) -> None:
    pattern = PIECES.get(piece, f"^(?!{'|'.join(PIECES.values()).replace('^', '')})")
    paths = whole.get("/openapi.json").json["paths"]
    chosen = [
        operation
        for path, methods in paths.items()
        if re.search(pattern, path) and not re.search(SLOW, path)
        for operation in methods.values()
        if operation["operationId"] not in PUSHES
    ]
    options = ["--include-path-regex", pattern, "--exclude-path-regex", SLOW]
    options += [word for name in PUSHES for word in ("--exclude-operation-id", name)]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = schemathesis(whole, tmp_path, 20, *options, checks=checks)
    assert f"Tested: {len(chosen)}" in done


def schemathesis(
    gateway: Running, folder: Path, examples: int, *options: str, checks: str = "not_a_server_error"
) -> str:
    """What schemathesis says of the gateway's document; it has found nothing."""
    fixed = ["--checks", checks, "--max-examples", str(examples), "--seed", "1", "--no-color"]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json", *fixed, *options],
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
