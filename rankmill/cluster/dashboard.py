"""The live page: the state of the cluster in a browser, without files from other servers."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import redis

from rankmill.cluster.history import History
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.runtime.passwords import mask_passwords

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

logger = logging.getLogger(__name__)

_PAGE = Path(__file__).resolve().parent / "page"

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

_LOOK_SECONDS = 2.0

_MAX_PAGE = 100_000

_HEADERS = [
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
]
"""The browser loads only files of this server, and no other page may frame this one."""


def page_apps(client: redis.Redis) -> dict[str, WSGIApplication]:
    """The page, its files and its data, by path; starts the thread that watches the cluster.

    Parameters
    ----------
    client
        Client of the server from `jobs.runtime.connection.impatient`: it does not wait for the server.
    """
    history = History()
    threading.Thread(target=_watch, args=(client, history), name="history", daemon=True).start()
    names = [path.name for path in _PAGE.iterdir() if path.suffix in _TYPES]
    files = {f"/{name}": _file(_PAGE / name) for name in names}
    return {"/": files.pop("/index.html"), **files, "/api/cluster.json": _cluster_json(client, history)}


def _watch(client: redis.Redis, history: History) -> None:
    """Add a snapshot to the history every 2 s while the process lives; log each new error once."""
    logged = ""
    while True:
        try:
            history.add(read_cluster(client))
        except Exception as error:
            if not isinstance(error, redis.RedisError | OSError) and logged != repr(error):
                logged = repr(error)
                logger.exception("no snapshot for the page's plots; trying again every %g s", _LOOK_SECONDS)
            history.add_gap(time.time())
        time.sleep(_LOOK_SECONDS)


def _cluster_json(client: redis.Redis, history: History) -> WSGIApplication:
    """Serves the history, and a snapshot with the requested page of runs or the error instead of it."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("page", ["0"])[0]
        page = min(int(asked[:9]), _MAX_PAGE) if asked.isdecimal() else 0
        found: dict[str, object] = {"series": history.series(), "rates": history.rates.model_dump()}
        status = HTTPStatus.OK
        try:
            found["cluster"] = read_cluster(client, page=page).model_dump()
        except (redis.RedisError, OSError) as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            found["error"] = mask_passwords(" ".join(str(error).split()))
        return _respond(start, status, "application/json", json.dumps(found, allow_nan=False).encode())

    return app


def _file(path: Path) -> WSGIApplication:
    body, content_type = path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8"

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return _respond(start, HTTPStatus.OK, content_type, body)

    return app


def _respond(start: StartResponse, status: HTTPStatus, content_type: str, body: bytes) -> Iterable[bytes]:
    length = ("Content-Length", str(len(body)))
    start(f"{status.value} {status.phrase}", [("Content-Type", content_type), length, *_HEADERS])
    return [body]
