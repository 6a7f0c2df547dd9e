"""Stands in for the Hugging Face hub: a server with the files of a data set, and a model that was fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" * 6 + "c0ff"


def fetched(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder in which the hub's client finds model some/model, and let it look nowhere else."""
    kept = folder / "hub" / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    (kept / "snapshots" / COMMIT).mkdir(parents=True)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setenv("HF_HUB_OFFLINE", "1")
    return kept / "snapshots" / COMMIT


@contextmanager
def hub(name: str, files: MutableMapping[str, bytes], token: str | None = None) -> Iterator[str]:
    """Serve the files of data set `name`, by their paths; yields the hub's URL. `files` may change.

    Who has the `token` may commit files, which come in the commit itself, as small ones do.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/revision/"):
                self._answer({"id": name, "sha": COMMIT, "siblings": [], "private": False})
            elif found := re.fullmatch(rf"/api/datasets/{name}/tree/[^/]+/?(.*)", path):
                self._answer(_below(files, found[1]))
            elif found := re.fullmatch(rf"/datasets/{name}/resolve/[^/]+/(.+)", path):
                self._send_file(files.get(found[1]))
            else:
                self._send(404, b"", {"x-error-code": "RepoNotFound"})

        def do_POST(self) -> None:
            body, path = self.rfile.read(int(self.headers["content-length"])), urlsplit(self.path).path
            if path.startswith(f"/api/datasets/{name}/paths-info/"):
                asked = json.loads(body)["paths"]
                self._answer([_about(path, files[path]) for path in asked if path in files])
            elif token is None or self.headers["authorization"] != f"Bearer {token}":
                self.send_error(403)
            elif path.startswith(f"/api/datasets/{name}/preupload/"):
                wanted = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                          for each in json.loads(body)["files"]]  # fmt: skip
                self._answer({"files": wanted})
            elif path.startswith(f"/api/datasets/{name}/commit/"):
                self._commit([json.loads(line) for line in body.splitlines()])
            else:
                self.send_error(404)

        def _commit(self, lines: list[Any]) -> None:
            for each in lines:
                about = each["value"]
                if each["key"] == "file":
                    files[about["path"]] = base64.b64decode(about["content"])
                elif each["key"] == "deletedFile":
                    del files[about["path"]]
            url = f"http://{self.headers['host']}/datasets/{name}/commit/{COMMIT}"
            self._answer({"commitUrl": url, "commitOid": COMMIT, "success": True})

        def _answer(self, body: object) -> None:
            self._send(200, json.dumps(body).encode(), {"content-type": "application/json"})

        def _send_file(self, data: bytes | None) -> None:
            if data is None:
                self.send_error(404)
                return
            first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            self._send(206, part, {"content-range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _about(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _below(files: Mapping[str, bytes], folder: str) -> list[dict[str, object]]:
    """The names directly in a folder."""
    start = f"{folder}/" if folder else ""
    inside = {path: data for path, data in files.items() if path.startswith(start)}
    folders = {path[len(start) :].partition("/")[0] for path in inside if "/" in path[len(start) :]}
    found = [_about(path, data) for path, data in inside.items() if "/" not in path[len(start) :]]
    return found + [{"type": "directory", "path": start + each, "oid": COMMIT} for each in sorted(folders)]
