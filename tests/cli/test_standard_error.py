"""Off a terminal, all that a command writes to standard error is one kind of line: JSON or plain."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.conftest import ENVIRON, Server, start_command, wait_for
from tests.harness.environ import BIN
from tests.harness.tools import slow_but

Form = Literal["auto", "json", "human"]
FORMS: list[Form] = ["auto", "json", "human"]


def is_json(line: str) -> bool:
    try:
        return set(json.loads(line)) >= {"time", "level", "logger", "message"}
    except ValueError:
        return False


def check(err: str, *, json_expected: bool) -> None:
    lines = err.splitlines()
    assert lines
    assert [line for line in lines if is_json(line) != json_expected] == []


def run(words: list[Any], form: Form, **environ: str) -> tuple[int, str]:
    process = start_command(*words, environ={"RANKMILL_LOG_FORMAT": form, **environ})
    _, err = process.communicate(timeout=240)
    return process.returncode, err


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    source = tmp_path / "pairs.jsonl"
    rows = [{"query": "cat", "passage": text} for text in ("a cat", "a dog", None)]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return source


@pytest.mark.parametrize("form", slow_but(FORMS, "auto"))
def test_a_command_that_logs_says_all_in_its_log(form: Form, server: Server, pairs: Path) -> None:
    logs = form != "human"
    away = ["--redis", "redis://127.0.0.1:1"]
    scored = ["--output", "-"]
    asked: dict[int, list[Any]] = {
        1: ["score-file", pairs, *away],
        2: ["score-file", "/no/such/file.csv", *away],
        3: ["score-file", pairs, "--model", "demo", *scored],  # row 2 has no score; an embedded server
    }
    for code, words in asked.items():
        found, err = run(words, form)
        assert found == code, err
        check(err, json_expected=logs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "words",
    [
        ["score-file", "--no-such-option"],
        ["score-workers", "--no-such-option"],
        ["rankmill", "no-such-command"],
        ["rankmill", "status", "--redis", "redis://127.0.0.1:1"],
        ["rankmill", "cancel", "0af"],
    ],
)
def test_what_is_said_before_the_log_is_plain_unless_json_is_asked_for(form: Form, words: list[str]) -> None:
    code, err = run(words, form)
    assert code in {1, 2}
    check(err, json_expected=form == "json")


@pytest.mark.parametrize("form", slow_but(FORMS, "auto"))
@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (["rankmill", "exporter", "--address", "127.0.0.1:0"], " at http://"),
        (["rankmill", "serve", "--port", "0", "--model", "demo"], " at http://"),
        (["score-workers", "--workers", "1"], "listening on"),
    ],
)
def test_a_service_writes_everything_in_one_log_format(
    form: Form, words: list[str], begun: str, server: Server, tmp_path: Path
) -> None:
    err = served([*words, "--redis", server.url], {"RANKMILL_LOG_FORMAT": form}, begun, tmp_path / "log")
    check(err, json_expected=form != "human")


def served(words: list[str], environ: Mapping[str, str], begun: str, log: Path) -> str:
    """What a service says until it has begun, and until SIGTERM has ended it."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [BIN / words[0], *words[1:]], stdout=out, stderr=out, env={**ENVIRON, **environ}
        )
    try:
        wait_for(lambda: begun in log.read_text(), process)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    return log.read_text()
