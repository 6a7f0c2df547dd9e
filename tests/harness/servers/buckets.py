"""A real S3 server on this host (moto's), with a bucket for each test. Fixture `bucket`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.harness.tools import free_port


@dataclass(frozen=True)
class Bucket:
    """An empty bucket: its URL, and the environment in which processes reach its server."""

    url: str
    environ: dict[str, str]


@pytest.fixture(scope="session")
def s3_environ() -> Iterator[dict[str, str]]:
    """The environment that names the server."""
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    yield {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


@pytest.fixture
def bucket(s3_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket; this process reaches it, too."""
    import s3fs

    for name, value in s3_environ.items():
        monkeypatch.setenv(name, value)
    name = f"test-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return Bucket(f"s3://{name}", s3_environ)
