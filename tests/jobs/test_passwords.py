"""Passwords: no form of a server's URL shows any part of one, in any text."""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.runtime import passwords
from rankmill.jobs.runtime.connection import client_for, connect
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.passwords import mask_passwords, mask_url, remember_password
from tests.conftest import BIN, ENVIRON, Server, wait_for
from tests.harness.tools import needs_package


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "_known", set())


# Parts that stand nowhere else, with any signs around and between them.
secrets = st.builds(
    lambda signs, parts: "".join(f"{sign}{part}" for sign, part in zip(signs, parts, strict=True)),
    st.lists(st.sampled_from([*"@:/?#%&=[]ü+'", '"', "%40", ""]), min_size=2, max_size=2),
    st.just(["zqx1", "zqx2"]),
)  # fmt: skip
PARTS = re.compile("zqx[12]")
spellings: st.SearchStrategy[Callable[[str], str]] = st.sampled_from(
    [str, quote, lambda text: quote(text, safe=""), quote_plus]
)
shapes = st.sampled_from(
    [
        "redis://:{}@127.0.0.1:1/0", "redis://me:{}@127.0.0.1:1", "rediss://me:{}@[::1]:1/2?db=3",
        "unix://me:{}@/nowhere/s?db=1", "redis://127.0.0.1:1?password={}", "redis://127.0.0.1:1/0?db=1&password={}",
        "unix:///nowhere/s?password={}&db=1", "redis://127.0.0.1:1?pass%77ord={}", "redis://:{}@",
        "redis://:{}@127.0.0.1:1?no_such_option=1",
        "redis+sentinel://me:{}@127.0.0.1:1,127.0.0.1:2/service/0", "rediss+sentinel://:{}@127.0.0.1:1/service",
        "redis+sentinel://127.0.0.1:1/service?sentinel_password={}",
    ]
)  # fmt: skip


@st.composite
def urls(draw: st.DrawFn) -> str:
    shape, secret = draw(shapes), draw(spellings)(draw(secrets))
    assume("@" in shape or "password" in shape or "@" in secret)
    assume("=" not in shape or "&" not in secret)  # another option begins there
    return shape.format(secret)


@given(urls(), urls())
@example("redis://u:zqx1?a=b@127.0.0.1:1", "redis://u:12/zqx2@127.0.0.1:1")
def test_no_part_is_left_in_any_text(first: str, second: str) -> None:
    assert not PARTS.search(mask_url(first))
    for text in (
        f"at {first}: refused",
        f"{first},{second}",
        f"'{first}' and ({second})",
        f"{first}\n{second}",
    ):
        assert not PARTS.search(mask_passwords(text)), text


@settings(max_examples=60)
@given(urls())
@example("redis://zqx1:12/zqx2@127.0.0.1:1")
@example("redis://:zqx1 zqx2@127.0.0.1:1")
@example("redis://:zqx1[zqx2@127.0.0.1:1")
def test_no_error_of_a_url_shows_a_part_of_it(url: str) -> None:
    attempts: list[Callable[[], object]] = [lambda: connect(url, 1), lambda: Client(url)]
    for attempt in attempts:
        try:
            attempt()
        except RankmillError as error:
            shown = f"{error!r} {error.__cause__} {getattr(error, '__notes__', '')}"
            assert not PARTS.search(shown.replace("redis://zqx1", "")), shown


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(url=urls())
def test_no_command_shows_a_part_of_it(url: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps({"redis_url": [url]}))
    (tmp_path / "pairs.csv").write_text("query,passage\nq,p\n")
    for command in (
        ["status", "--redis", url],
        ["workers", "--redis", url],
        ["score", str(tmp_path / "pairs.csv"), "--redis", url],
        ["config", "show", "--config", str(tmp_path / "config.yaml")],
    ):
        done = CliRunner().invoke(rankmill, command)
        assert done.exit_code in {1, 2}, done.exception
        assert not PARTS.search(done.output), done.output
    shown = CliRunner().invoke(rankmill, ["config", "show"], env={"REDIS_URL": url})
    assert not PARTS.search(shown.output), shown.output


def test_a_server_that_repeats_the_password_is_masked() -> None:
    client = client_for("redis://me:p%40ss-zqx1@127.0.0.1:1", 1)
    assert client.connection_pool.connection_kwargs["password"] == "p@ss-zqx1"
    reply = "unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `me`, `p@ss-zqx1`, "
    assert "zqx1" not in mask_passwords(reply)


def test_a_short_password_is_masked_only_where_it_stands_alone() -> None:
    remember_password("run")
    assert mask_passwords("AUTH 'run' of a running run-7") == "AUTH '***' of a running ***-7"


def test_logs_stay_json(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", "json")
    logging.getLogger("rankmill.jobs").warning("at %s", "redis://host?password=zqx1")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "at redis://host?password=***"


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:p%20w@host:1/2",
        "redis://host:1?db=2",
        "unix:///tmp/a.sock?db=1",
        "redis+sentinel://me:p%20w@one:1,two:2/service/3?db=4",
        "no url",
    ],
)
def test_the_rest_of_a_url_stays(url: str) -> None:
    assert mask_url(url) == url.replace("p%20w", "***")


def test_processes_do_not_show_the_password_to_others(server: Server, tmp_path: Path) -> None:
    needs_package("torch")
    server.client.config_set("requirepass", "zqx1@/:zqx2")
    server.client.auth("zqx1@/:zqx2")
    url = f"{server.url.replace('unix://', 'unix://:zqx1%40%2F%3Azqx2@')}"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [BIN / "score-workers", "--device", "cpu"],
            env={**ENVIRON, "REDIS_URL": url},
            stdout=out,
            stderr=out,
        )
    try:
        wait_for(lambda: "listening on" in log.read_text(), process)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) == 2
        for each in family:
            assert not PARTS.search(" ".join(each.cmdline())), each.cmdline()
    finally:
        process.terminate()
        process.wait(timeout=60)
        server.client.config_set("requirepass", "")
    assert not PARTS.search(log.read_text())
