"""One gateway for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.gateways import Running, running_gateway
from tests.harness.servers.valkey import Server


@pytest.fixture(scope="module")
def gateway(
    shared_queue: Server, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A gateway with a real worker, which serves the shipped model and a tiny one."""
    models = ["--model", "demo", "--model", str(tiny_model)]
    with running_gateway(shared_queue.url, tmp_path_factory.mktemp("gateway"), *models) as running:
        yield running
