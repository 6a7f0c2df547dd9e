"""What comes over one connection to a running gateway, byte by byte: where each request begins and ends."""

from __future__ import annotations

import itertools
import json
import re
import socket
from contextlib import suppress

import pytest

from tests.harness.gateways import PAIR, Running

QUERY, TEXTS = PAIR
SCORED = json.dumps({"query": QUERY, "texts": TEXTS}).encode()
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
UPGRADES = (
    b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n",
    b"Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\nSec-WebSocket-Version: 13\r\n",
    b"Upgrade: TLS/1.0, HTTP/2.0\r\n",
    b"Upgrade: h2c\r\nUpgrade: websocket\r\n",
    b"uPGRADE: anything/1\r\n",
)
CONNECTIONS = (
    b"",
    b"Connection: Upgrade\r\n",
    b"Connection: keep-alive, upgrade, HTTP2-Settings\r\n",
    b"Connection: keep-alive\r\nConnection: UPGRADE\r\n",
)


def sent(gateway: Running, *pieces: bytes) -> bytes:
    """All that the gateway sends until it closes the connection."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = list[bytes]()
        with suppress(ConnectionError):  # what was sent after the end resets the connection
            for piece in pieces:
                line.sendall(piece)
            found += iter(lambda: line.recv(65536), b"")
        return b"".join(found)


def statuses(raw: bytes) -> list[int]:
    """The status of each answer."""
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", raw)]


def request(method: bytes, path: bytes, headers: bytes, body: bytes, *, chunked: bool) -> tuple[bytes, bytes]:
    """Head and body of a request."""
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    line = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % (method, path)
    half = len(body) // 2
    parts = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return line + headers + length + b"\r\n\r\n", parts + b"0\r\n\r\n" if chunked else body


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("upgrade", UPGRADES, ids=["h2c", "websocket", "list", "two", "anything"])
def test_a_request_that_asks_for_an_upgrade_is_answered_as_any_other(
    gateway: Running, upgrade: bytes, chunked: bool
) -> None:
    for connection in CONNECTIONS:
        head, body = request(b"POST", b"/rerank", upgrade + connection, SCORED, chunked=chunked)
        for pieces in ((head, body, LAST), (head + body + LAST,)):
            answer = sent(gateway, *pieces)
            assert statuses(answer) == [200, 200], answer
            assert b'[{"index":1,' in answer


@pytest.mark.parametrize("method", [b"POST", b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT"])
def test_a_body_is_never_answered_as_a_request(gateway: Running, method: bytes) -> None:
    path = b"/rerank" if method in {b"POST", b"CONNECT"} else b"/health"
    for upgrade, chunked, target in itertools.product((b"", *UPGRADES), (False, True), (path, b"/nowhere")):
        headers = upgrade + b"Connection: Upgrade\r\n" if upgrade else b""
        head, body = request(method, target, headers, SMUGGLED, chunked=chunked)
        answer = sent(gateway, head, body, LAST)
        assert len(statuses(answer)) == 2, answer
        assert b'"demo"' not in answer
        assert b'{"version":' in answer


def test_requests_that_come_together_are_answered_in_their_order(gateway: Running) -> None:
    ask = request(b"POST", b"/rerank", UPGRADES[0] + CONNECTIONS[1], SCORED, chunked=True)
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    asked = [health % b"", *ask, health % (UPGRADES[1] + CONNECTIONS[1]), SMUGGLED, LAST]
    for pieces in (asked, [b"".join(asked)]):
        answer = sent(gateway, *pieces)
        assert statuses(answer) == [200] * 5
        places = [answer.index(each) for each in (b'"status"', b'"index"', b'"demo"', b'"version"')]
        assert places == sorted(places)


@pytest.mark.parametrize("upgrade", [b"", UPGRADES[0] + CONNECTIONS[1]], ids=["plain", "h2c"])
def test_a_body_that_waits_to_be_asked_for_is_asked_for(gateway: Running, upgrade: bytes) -> None:
    head, body = request(b"POST", b"/rerank", upgrade + b"Expect: 100-continue\r\n", SCORED, chunked=False)
    assert statuses(sent(gateway, head, body, LAST)) == [100, 200, 200]


@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_a_connection_whose_body_was_not_asked_for_is_closed(gateway: Running, method: bytes) -> None:
    """The client may send the body or not, so nobody could tell where the next request begins."""
    head, _ = request(method, b"/health", b"Expect: 100-continue\r\n", SMUGGLED, chunked=False)
    answer = sent(gateway, head)
    assert statuses(answer) == [200 if method == b"GET" else 405]
    assert b"connection: close\r\n" in answer.lower()


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 44\r\n",
        b"Content-Length: 4, 44\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: 0x4\r\n",
        b"Content-Length : 4\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding\r\n : chunked\r\n",
        b"Transfer-Encoding: chunked\rX: y\r\n",
    ],
)
def test_a_body_whose_end_is_in_doubt_ends_the_connection(gateway: Running, framing: bytes) -> None:
    for upgrade in (b"", UPGRADES[0] + CONNECTIONS[1]):
        head = b"POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = sent(gateway, head + upgrade + framing + b"\r\n0\r\n\r\n" + SMUGGLED + LAST)
        assert statuses(answer) == [400], answer
        assert b"connection: close\r\n" in answer.lower()


def test_a_target_may_be_a_whole_address(gateway: Running) -> None:
    answer = sent(gateway, LAST.replace(b"/version", b"http://localhost:9809/version"))
    assert statuses(answer) == [200]
    assert b'{"version":' in answer


def test_what_is_no_http_is_told_in_a_line(gateway: Running) -> None:
    answer = sent(gateway, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n")
    assert statuses(answer) == [400]
    assert b"Invalid HTTP request received. illegal request line" in answer


@pytest.mark.parametrize("path", [b"/rerank", b"/health", b"/nowhere"])
def test_a_body_that_is_broken_ends_the_connection(gateway: Running, path: bytes) -> None:
    head, _ = request(b"GET" if path == b"/health" else b"POST", path, b"", b"", chunked=True)
    for pieces in ((head, b"2\r\n{}\r\nno chunk\r\n\r\n"), (head + b"no chunk\r\n",)):
        assert len(statuses(sent(gateway, *pieces, SMUGGLED))) <= 1
    assert "Traceback" not in gateway.log.read_text()
