"""docs/guides/serve.md: every path is there, and every line of it works; so does the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankmill.extensions.gateway.dialects.routes import dialects
from tests.harness.gateways import Running
from tests.harness.tools import tool

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "docs" / "guides" / "serve.md").read_text()
LINES = re.findall(r"^curl .*$", TEXT, re.M)


def test_every_path_has_a_line(gateway: Running) -> None:
    named = {re.search(r"localhost:9809(/[^ ?]*)", line)[1] for line in LINES}  # type: ignore[index]
    paths = {path for path in gateway.get("/openapi.json").json["paths"] if "{" not in path}
    paths -= {"/v1/files", "/v1/batches"}  # tests/extensions/batches/test_batches.py
    assert paths <= named, paths - named


def test_the_document_says_how_keys_come_and_whose_each_path_is(gateway: Running) -> None:
    document = gateway.get("/openapi.json").json
    schemes = document["components"]["securitySchemes"]
    assert {(each["type"], each.get("scheme") or each["name"]) for each in schemes.values()} == {
        ("http", "bearer"),
        ("apiKey", "x-api-key"),
    }
    assert [*map(list, document["security"])] == [[name] for name in schemes]  # either
    free = set()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            free |= {path} if operation.get("security") == [] else set()
            if (prefix := path.split("/")[1]) in dialects():
                assert operation["tags"] == [prefix], path
    assert free == {"/health", "/ping", "/ready", "/version"}


@pytest.mark.slow
def test_every_curl_line_of_the_documents_is_answered(gateway: Running) -> None:
    tool("curl", "curl")
    script = "\n".join(
        line.replace("curl ", "curl --silent --show-error --fail-with-body ").replace(
            "localhost:9809", gateway.url
        )
        for line in LINES
        if "cache" not in line  # test_http.py: each takes a worker's heartbeat
        and "registry" not in line  # test_registry_routes.py
    )
    done = subprocess.run(
        ["bash", "-e", "-c", script], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


def test_the_example_ranks_and_streams(gateway: Running) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "http_client.py"), gateway.url],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    best, *rest = done.stdout.splitlines()
    assert best.endswith("About 384,400 km from the earth.")
    assert rest[-1] == "all scores are there"
    assert sum(int(line.split()[0]) for line in rest if line.endswith(" scores")) == 300
