"""Clients of other rerank services, as PyPI has them, against a running gateway."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.gateways import Running
from tests.rankmill.gateway import real_clients

ROOT = Path(__file__).resolve().parents[3]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"


@pytest.mark.parametrize("name", ["cohere_v1", "cohere_v2", "tei_client"])
def test_a_client_finds_the_best_text(gateway: Running, name: str) -> None:
    # In a process of its own: tei_client and rankmill's own gRPC module both have the package tei.v1.
    code = f"from tests.rankmill.gateway import real_clients; print(real_clients.{name}({gateway.url!r}))"
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


def test_nothing_in_the_openapi_document_ends_in_a_server_error(gateway: Running, tmp_path: Path) -> None:
    paths = "^/((v1/|v2/)?rerank|score|predict|infinity/rerank)$"
    done = schemathesis(gateway, tmp_path, 4, "--phases", "fuzzing", "--include-path-regex", paths)
    assert "Tested: 6" in done


@pytest.mark.long
def test_no_path_of_the_openapi_document_ends_in_a_server_error(gateway: Running, tmp_path: Path) -> None:
    paths = gateway.get("/openapi.json").json["paths"]
    # Orders to workers wait for heartbeats, up to a minute each; events last as long as their batch.
    slow = "^/v1/(cache/.*|batches/{id}/events)$"
    done = schemathesis(gateway, tmp_path, 30, "--exclude-path-regex", slow)
    operations = sum(len(methods) for path, methods in paths.items() if not re.match(slow, path))
    assert f"Tested: {operations}" in done


def schemathesis(gateway: Running, folder: Path, examples: int, *options: str) -> str:
    """What schemathesis says of the gateway's document; it has met no server error."""
    fixed = ["--checks", "not_a_server_error", "--max-examples", str(examples), "--seed", "1", "--no-color"]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json", *fixed, *options],
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout
