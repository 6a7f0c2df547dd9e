"""The page at / and /docs, in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from rankmill.extensions.gateway.http import page_routes
from tests.conftest import Server
from tests.harness.browser import browser, shown
from tests.harness.gateways import PAIR, Running, running_gateway

PAGE = Path(page_routes.__file__).parent / "page"
QUERY, TEXTS = PAIR


def test_a_browser_ranks_passages(gateway: Running, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    gateway.post("/rerank", {"query": QUERY, "texts": TEXTS})  # the model is loaded now
    html = shown(
        f"{gateway.url}/?{urlencode({'query': QUERY, 'passage': [*TEXTS, evil]}, doseq=True)}", tmp_path
    )
    rows = re.findall(r"<tr><td>(\d)</td><td>([0-9.]+)</td><td>(.*?)</td></tr>", html)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[0][2] == TEXTS[1]
    assert float(rows[0][1]) > float(rows[1][1])
    assert "&lt;img src=x" in html
    assert '<option value="demo">demo</option>' in html
    curl, python = (
        unescape(found) for found in re.findall(r'<pre id="(?:curl|python)"[^>]*>(.*?)</pre>', html, re.S)
    )
    answer = json.loads(subprocess.run(["sh", "-c", f"{curl} -s"], capture_output=True, check=True).stdout)
    assert [f"{each['relevance_score']:.4f}" for each in answer["results"]] == [row[1] for row in rows]
    said = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0].partition(" ")[2] == TEXTS[1]
    assert 'id="notice" class="notice" role="alert" hidden' in html


def test_the_page_ranks_whatever_gateway_dialect_is(shared_queue: Server, tmp_path: Path) -> None:
    """Voyage's answer to ``/v1/rerank`` has no ``results``."""
    environ = {"RANKMILL_GATEWAY_DIALECT": "voyage"}
    with running_gateway(shared_queue.url, tmp_path, "--model", "demo", environ=environ) as gateway:
        gateway.post("/rerank", {"query": QUERY, "texts": TEXTS})  # the model is loaded now
        asked = urlencode({"query": QUERY, "passage": TEXTS}, doseq=True)
        assert TEXTS[1] in shown(f"{gateway.url}/?{asked}", tmp_path).partition('<tbody id="ranked">')[2]


def test_a_browser_says_what_is_wrong(gateway: Running, tmp_path: Path) -> None:
    html = shown(f"{gateway.url}/?{urlencode({'query': QUERY, 'passage': ' '})}", tmp_path)
    assert "there is nothing to score" in html


KEY = "a-key-of-sixteen-and-more"


@pytest.fixture(scope="module")
def with_key(shared_queue: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway that needs a key."""
    environ = {"RANKMILL_GATEWAY_API_KEY": KEY}
    place = tmp_path_factory.mktemp("gateway")
    with running_gateway(shared_queue.url, place, "--model", "demo", environ=environ) as gateway:
        gateway.post("/rerank", {"query": QUERY, "texts": TEXTS}, x_api_key=KEY)  # the model is loaded now
        yield gateway


@pytest.mark.slow
def test_a_key_that_is_typed_counts_at_the_first_click(with_key: Running, tmp_path: Path) -> None:
    with browser(tmp_path) as driven:
        driven.open(with_key.url)
        driven.wait("document.querySelector('#notice').textContent.includes('give an API key')")
        driven.click("#key")
        driven.type(KEY)
        driven.click("#send")
        driven.wait("document.querySelectorAll('#ranked tr').length === 3")
        places = "['model', 'key', 'send'].map((id) => document.getElementById(id).getBoundingClientRect())"
        assert len({round(each["y"]) for each in driven.run(f"{places}.map(({{y}}) => ({{y}}))")}) == 1
        assert KEY not in driven.run("document.body.innerText")


@pytest.mark.slow
def test_the_docs_page_follows_a_dark_theme_and_authorize_sends_the_key(
    with_key: Running, tmp_path: Path
) -> None:
    with browser(tmp_path) as driven:
        driven.open(f"{with_key.url}/docs")
        driven.wait("document.querySelector('.swagger-ui')")
        for scheme, back in (("dark", "rgb(28, 32, 34)"), ("light", "rgba(0, 0, 0, 0)")):
            wanted = {"name": "prefers-color-scheme", "value": scheme}
            driven.send("Emulation.setEmulatedMedia", features=[wanted])
            driven.wait(f"getComputedStyle(document.documentElement).backgroundColor === '{back}'")
        driven.click(".btn.authorize")
        driven.click(".auth-container input")
        driven.type(KEY)
        driven.click(".auth-container .authorize")
        driven.click(".auth-btn-wrapper .btn-done")
        driven.click("#operations-gateway-get_v1_models .opblock-summary-control")
        driven.click("#operations-gateway-get_v1_models .try-out__btn")
        driven.click("#operations-gateway-get_v1_models .execute")
        driven.wait("document.querySelector('.live-responses-table .response-col_status')")
        told = driven.run("document.querySelector('.live-responses-table').innerText")
        assert "200" in told
        assert '"demo"' in told


@pytest.mark.slow
def test_the_documentation_needs_no_other_server(gateway: Running, tmp_path: Path) -> None:
    html = shown(f"{gateway.url}/docs", tmp_path)
    assert "/v2/rerank" in html
    assert "Voyage: order documents by their score with a query" in html


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(gateway: Running) -> None:
    reply = gateway.get("/")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    for file in PAGE.iterdir():
        text = file.read_text()
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://|innerHTML|@import", text), file
    for path in (
        "/page.js",
        "/page.css",
        "/docs/docs.js",
        "/docs/swagger-ui-bundle.js",
        "/docs/swagger-ui.css",
    ):
        assert gateway.get(path).status == 200
