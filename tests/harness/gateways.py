"""Running gateways, and what they answer."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from tests.harness.environ import ENVIRON
from tests.harness.preloaded import PreloadedProcess
from tests.harness.processes import address_in, rankmill_words, wait_for

PAIR = ("how far is the moon", ["Cheese.", "About 384,400 km."])
"""A query and two passages, of which the second is the better."""


@dataclass(frozen=True)
class Reply:
    """A server's answer."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Running:
    """A gateway that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, **headers: str) -> Reply:
        """GET a path."""
        return self.send(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """POST a body: bytes as they are, all else as JSON; underlines in names of headers are dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        found = {"content-type": "application/json", **named}
        return self.send(urllib.request.Request(self.url + path, raw, found))

    def send(self, request: urllib.request.Request) -> Reply:
        """Send a request; refusals are replies as well."""
        try:
            with urllib.request.urlopen(request, timeout=240) as reply:
                return Reply(reply.status, reply.headers, reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers, error.read())


@contextmanager
def running_gateway(
    redis_url: str | None,
    directory: Path,
    *options: str,
    environ: Mapping[str, str] | None = None,
    code: int = 0,
    before: str = "",
) -> Iterator[Running]:
    """A gateway for as long as the ``with`` block lasts, of a server or embedded; it ends with `code`.

    ``before`` is that of `rankmill_words`. On a busy machine requests wait long, and are refused only if
    `environ` says so.
    """
    patient = {"RANKMILL_GATEWAY_BACKLOG_SECONDS": "3600"}
    log = directory / "gateway.log"
    place = ["--redis", redis_url] if redis_url else ["--embedded"]
    command = [*rankmill_words(before), "serve", *place, "--port", "0", *options]
    with log.open("wb") as out:
        process: subprocess.Popen[bytes] = PreloadedProcess(
            command, cwd=directory, stdout=out, stderr=out, env={**ENVIRON, **patient, **(environ or {})}
        )
    try:
        wait_for(lambda: " at http://" in log.read_text(), process)
        (line,) = [line for line in log.read_text().splitlines() if " at http://" in line]
        yield Running(address_in(line), process, log)
        if process.poll() is None:
            process.terminate()
        assert process.wait(timeout=60) == code, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text(), log.read_text()
