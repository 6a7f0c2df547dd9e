"""Clients of other rerank services, as PyPI has them, against a running gateway."""

from __future__ import annotations

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
    options = ["--checks", "not_a_server_error", "--max-examples", "4", "--seed", "1", "--no-color"]
    only = [
        "--phases",
        "fuzzing",
        "--include-path-regex",
        "^/((v1/|v2/)?rerank|score|predict|infinity/rerank)$",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json", *options, *only],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Tested: 6" in done.stdout
