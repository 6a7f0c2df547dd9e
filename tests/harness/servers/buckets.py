"""A real S3 server on this host (moto's), with a bucket for each test. Fixtures `bucket`, `s3_store`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.harness.tools import free_port

if TYPE_CHECKING:
    import s3fs


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
        "AWS_MAX_ATTEMPTS": "1",  # what it refuses it refuses again; botocore would wait for seconds
    }
    server.stop()


@pytest.fixture(scope="session")
def s3_store(s3_environ: dict[str, str]) -> s3fs.S3FileSystem:
    """A client of the server for all tests: to make one takes a third of a second."""
    import s3fs

    return s3fs.S3FileSystem(
        key=s3_environ["AWS_ACCESS_KEY_ID"],
        secret=s3_environ["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=s3_environ["AWS_ENDPOINT_URL"],
        use_listings_cache=False,
        skip_instance_cache=True,
    )


@pytest.fixture
def bucket(
    s3_environ: dict[str, str], s3_store: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    """A bucket; this process reaches it, too."""
    for name, value in s3_environ.items():
        monkeypatch.setenv(name, value)
    name = f"test-{uuid.uuid4().hex}"
    s3_store.mkdir(name)
    return Bucket(f"s3://{name}", s3_environ)
