"""The command family: how all commands end, what their help says, what a shell completes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import click
import pyarrow as pa
import pytest
import redis
from click.testing import CliRunner, Result

from rankmill.cli import options
from rankmill.cli.main import rankmill
from rankmill.jobs.contract import errors
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.runtime.settings import Settings, load_settings
from rankmill.jobs.system import system
from tests.conftest import BIN, ENVIRON, Server, run_command, start_command

FAMILY = [
    "score", "merge", "wait", "mine", "submit", "serve", "keys", "runner", "status", "workers", "runs",
    "errors", "cancel", "jobs", "usage", "exporter", "config", "quantize", "models", "tune", "experiment",
    "check-precision", "evaluate",
]  # fmt: skip


def end_with(error: BaseException) -> Result:
    """Run a command that raises `error`."""

    @options.command("some-command", interrupted="half of it is kept")
    def some_command() -> None:
        raise error

    return CliRunner().invoke(some_command)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.ConfigError("queue: bad"), 2, "queue: bad"),
        (errors.InputError("a.csv: no such file"), 2, "a.csv: no such file"),
        (errors.ConnectionFailed("no usable Redis"), 1, "no usable Redis"),
        (errors.RunFailed("the model\ncannot be loaded"), 1, "the model cannot be loaded"),
        (redis.ResponseError("OOM of redis://a:secret@b"), 1, "OOM of redis://a:***@b"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (pa.ArrowInvalid("no such type"), 1, "no such type"),
        (MemoryError(), 1, "MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted; half of it is kept"),
    ],
)
def test_every_failure_is_one_line_and_the_code_of_its_kind(
    error: BaseException, code: int, line: str
) -> None:
    done = end_with(error)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"some-command: {line}\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["evalute"], "Did you mean 'evaluate'?"),
        (["stauts"], "Did you mean 'status'?"),
        (["models", "pusch"], "Did you mean 'push'?"),
        (["workers", "drian"], "Did you mean 'drain'?"),
        (["score", "a.csv", "--colums", "a,b"], "'--columns'"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(words: list[str], meant: str) -> None:
    done = CliRunner().invoke(rankmill, words)
    assert (done.exit_code, meant in done.stderr.splitlines()[-1]) == (2, True), done.stderr


def test_tables_are_as_wide_as_they_are_where_no_terminal_reads(server: Server) -> None:
    """And names whole: a program cannot put together what is cut at 80 columns."""
    names = [f"{'very-' * 40}long-{number}" for number in range(2)]
    for name in names:
        report = WorkerReport(device="cpu", started=system.now(), beat=system.now(), models=(), answers=())
        announce_worker(server.client, name, report, 60)
        server.client.sadd("rq:workers", f"rq:worker:{name}")
        server.client.sadd("rq:queues", f"rq:queue:{name}")
    for command in ("status", "workers"):
        done = CliRunner().invoke(rankmill, [command, "--redis", server.url], env={"COLUMNS": None})
        assert all(any(name in line for line in done.stdout.splitlines()) for name in names), done.output
    narrow = CliRunner().invoke(rankmill, ["status", "--redis", server.url], env={"COLUMNS": "60"})
    assert max(map(len, narrow.stdout.splitlines())) <= 60


def test_notes_stand_in_the_same_line() -> None:
    error = errors.RunFailed("it failed")
    error.add_note("7 rows are kept")
    assert end_with(error).stderr == "some-command: it failed; 7 rows are kept\n"


def test_a_bug_is_not_hidden() -> None:
    assert isinstance(end_with(ZeroDivisionError()).exception, ZeroDivisionError)


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    @options.command("some-command")
    def some_command() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    done = CliRunner().invoke(some_command)
    assert (done.exit_code, done.stderr) == (130, "some-command: interrupted\n")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_ends_a_command_that_waits_for_its_threads(sent: signal.Signals) -> None:
    code = """
import threading
from rankmill.cli import options

@options.command("some-command")
def some_command():
    threading.Thread(target=threading.Event().wait).start()
    raise KeyboardInterrupt

some_command()
"""
    process = start_command("python", "-c", code)
    assert process.stderr
    assert "interrupted" in process.stderr.readline()
    process.send_signal(sent)
    _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (-sent, "")


def test_every_error_class_has_an_exit_code() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.RankmillError)
    ]
    assert len(kinds) > 10
    assert {kind.exit_code for kind in kinds} == {errors.ExitCode.FAILED, errors.ExitCode.USAGE}


@pytest.mark.parametrize("name", FAMILY)
def test_each_command_of_the_family_has_help(name: str) -> None:
    shown = CliRunner().invoke(rankmill, [name, "-h"])
    assert shown.exit_code == 0
    assert f"  {name} " in CliRunner().invoke(rankmill, ["--help"]).output
    assert "..." not in CliRunner().invoke(rankmill, ["--help"]).output.replace("[ARGS]...", "")


def test_help_names_the_default_of_every_setting() -> None:
    settings = load_settings(environ={})
    for name in ("score", "check-precision", "status"):
        command = rankmill.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        for option in command.params:
            if not isinstance(option, click.Option) or option.name not in Settings.model_fields:
                continue
            shown = getattr(option, "help", "")
            default = getattr(settings, option.name)
            if isinstance(default, float):
                default = f"{default:g}"
            assert "[default: " in shown, option.name
            assert default in (None, (), "") or f"[default: {default}]" in shown, option.name


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("rankmill ", FAMILY),
        ("rankmill score --device c", ["cpu", "cuda"]),
        ("rankmill workers start --log-level ", ["debug", "info", "warning", "error"]),
    ],
)
def test_a_shell_completes_commands_and_values(words: str, completed: list[str]) -> None:
    assert completions(words) == completed


def completions(words: str, **environ: str) -> list[str]:
    """What bash offers after these words."""
    *before, _ = words.split(" ")
    asked = {"_RANKMILL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(before))}
    done = run_command("rankmill", environ={**asked, **environ})
    assert done.code == 0, done.err
    return [line.partition(",")[2] for line in done.out.splitlines()]


def test_a_shell_completes_live_workers_and_their_models(server: Server) -> None:
    for name, models in (("box.cpu.7", ("m/a", "m/b")), ("gpu.cuda0.8", ("m/b",))):
        server.client.sadd("rq:workers", f"rq:worker:{name}")
        report = WorkerReport(device="cpu", started=1, beat=1, models=models, answers=())
        announce_worker(server.client, name, report, 60)
    url = {"REDIS_URL": server.url}
    assert completions("rankmill workers drain ", **url) == ["box.cpu.7", "gpu.cuda0.8"]
    assert completions("rankmill workers warm m gpu", **url) == ["gpu.cuda0.8"]
    assert completions("rankmill workers unload ", **url) == ["m/a", "m/b"]
    assert not any(completions("rankmill workers drain ", REDIS_URL="redis://127.0.0.1:1"))


def test_workers_are_watched_until_ctrl_c(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(system, "sleep", interrupt)
    watched = CliRunner().invoke(rankmill, ["workers", "--watch", "--json", "--redis", server.url])
    assert (watched.exit_code, watched.output) == (0, "[]\n")


def test_one_run_is_not_watched() -> None:
    refused = CliRunner().invoke(rankmill, ["status", "abc", "--watch"])
    assert refused.exit_code == 2
    assert "--watch has no effect on one run" in refused.stderr


def test_options_of_workers_are_those_of_its_commands(server: Server) -> None:
    nobody = CliRunner().invoke(rankmill, ["workers", "--redis", server.url, "drain", "x"])
    assert nobody.exit_code == 2
    assert nobody.stderr == "rankmill workers drain: no worker is called x; rankmill workers lists them\n"


@pytest.mark.slow
def test_score_and_score_file_are_one_command(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,passage\n")
    for command in (["score-file"], ["rankmill", "score", "--force"]):
        done = subprocess.run(
            [BIN / command[0], *command[1:], "a.csv", "--json"],
            cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["rows"] == 0
