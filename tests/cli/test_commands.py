"""The rankmill command: what is shown of a cluster, and how a run is stopped."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click import Context
from click.testing import CliRunner

from rankmill import Client
from rankmill.cli.main import rankmill as command_line
from rankmill.cli.request import GROUPS
from rankmill.cluster.snapshot import RunState, read_cluster
from rankmill.cluster.tables import plain
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.results import Amounts
from rankmill.jobs.contract.run import RowError, new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.accounts import Accountant
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import LogFormat
from tests.conftest import Outcome, Server, StartWorker, score_file, start_command, wait_for
from tests.harness.held import Held


def rankmill(*arguments: object) -> Outcome:
    done = CliRunner().invoke(command_line, [*map(str, arguments)], env={"COLUMNS": "140"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


def test_status_runs_and_errors_of_a_live_run(server: Server, workers: StartWorker, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=10, window=2)
    assert "No runs." in rankmill("status", "--redis", server.url).out
    run = client.submit([("big cat", "moon" if number != 5 else None) for number in range(300)])
    nobody = rankmill("status", "--redis", server.url).out
    assert "no workers, 2 chunks wait: start some with score-workers --queue rankmill." in nobody
    workers(name="w1")
    parts = run.tables()
    next(parts)
    shown = rankmill("status", "--redis", server.url)
    assert shown.code == 0
    assert "w1" in shown.out
    assert run.id[:12] in shown.out
    state = json.loads(rankmill("status", "--json", "--redis", server.url).out)
    assert [worker["name"] for worker in state["workers"]] == ["w1"]
    assert state["runs"][0]["row_errors"] == 1
    listed = json.loads(rankmill("runs", "--json", "--redis", server.url).out)
    assert (listed["total"], listed["runs"][0]["rows"]) == (1, 300)
    assert run.id[:12] in rankmill("runs", "--redis", server.url).out
    assert "passage is null" in rankmill("errors", run.id[:6], "--redis", server.url).out
    error = json.loads(rankmill("errors", run.id, "--json", "--redis", server.url).out)
    assert error == {"row": 5, "error": "passage is null", "attempts": 1, "worker": "w1"}
    for _ in parts:
        pass
    gone = rankmill("errors", run.id, "--redis", server.url)
    assert gone.code == 2
    assert "OUTPUT.errors.jsonl" in gone.err
    assert len(gone.err.splitlines()) == 1


@pytest.mark.slow
def test_a_cancelled_score_file_says_so_and_can_be_continued(held: Held, tmp_path: Path) -> None:
    server, rows = held.server, 600
    source = tmp_path / "a.parquet"
    passages = [f"the moon {row}" if row != rows // 2 else "hold" for row in range(rows)]
    pq.write_table(pa.table({"query": ["cat"] * rows, "passage": passages}), source)
    options = [source, "--redis", server.url, "--model", held.model, "--chunk-size", "16"]
    process = start_command("score-file", *options)

    def scored() -> list[RunState]:
        return [run for run in read_cluster(server.client).runs if run.rows_done > 100]  # some chunks

    wait_for(scored, process)
    done = rankmill("cancel", scored()[0].id[:8], "--redis", server.url)
    assert done.code == 0, done.err
    assert "is cancelled" in done.out
    held.go()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = Outcome(1, "", err).complaints
    assert "was cancelled" in line
    assert "the same command continues" in line
    assert not (tmp_path / "a.scored.parquet").exists()
    assert not list(server.client.scan_iter("rankmill:run*"))
    wait_for(lambda: not list(server.client.scan_iter("rq:job:*")))
    again = score_file(*options, "--json")
    assert again.code == 0, again.err
    assert again.summary["rows"] == rows
    assert again.summary["resumed_rows"] > 0
    assert pq.read_table(tmp_path / "a.scored.parquet")["score"].null_count == 0


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("serve --workers 2", "--workers is for embedded workers"),
        ("serve --embedded --redis redis://h", "give either --redis or --embedded"),
        ("check-precision a.csv --redis redis://h --device cpu", "--device is for embedded workers"),
        ("models compare a@v1 a@v2 a.csv --redis redis://h --backend torch", "--backend is for embedded"),
        ("submit a.csv -o b.csv --redis redis://h --long-stride 9", "no effect without --long split"),
        ("workers --json drain w", "--json has no effect before drain"),
        ("jobs --json retry --all", "--json has no effect before retry"),
        ("usage --json --by model", "--by has no effect with --json"),
    ],
)
def test_an_option_without_effect_is_refused(command: str, why: str) -> None:
    done = rankmill(*command.split())
    assert (done.code, why in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "command",
    [
        ["score", "{pairs}"],
        ["check-precision", "{pairs}"],
        ["workers"],
        ["status"],
        ["runs"],
        ["cancel", "0af"],
        ["errors", "0af"],
    ],
)
def test_a_server_that_is_away_is_one_line_and_one_code_everywhere(
    command: list[str], tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("query,passage\nq,p\n")
    command = [part.format(pairs=pairs) for part in command]
    done = rankmill(*command, "--redis", "redis://me:secret@127.0.0.1:1")
    assert done.code == 1
    assert "secret" not in done.err
    (line,) = done.messages
    assert line.startswith(f"rankmill {command[0]}: no usable Redis at redis://me:***@127.0.0.1:1")


@pytest.mark.parametrize("command", [["workers"], ["status"], ["runs"], ["cancel", "0af"], ["exporter"]])
def test_commands_that_need_a_server_ask_for_it(command: list[str]) -> None:
    done = rankmill(*command)
    assert (done.code, done.messages) == (
        2,
        [f"rankmill {command[0]}: no Redis server is named: give --redis or set REDIS_URL"],
    )


def test_a_run_is_named_by_how_its_id_begins(server: Server, tiny_model: Path) -> None:
    client = Client(server.url, model=str(tiny_model))
    run = client.submit([("q", "p")])
    server.client.zadd(keys.runs(), {run.id[:4] + "f" * 28: 4e9})
    both = rankmill("cancel", run.id[:3], "--redis", server.url)
    assert both.code == 2
    assert "2 runs begin with" in both.err
    for unknown in ("*", "nonsense", run.id[:4] + "f" * 28):
        assert rankmill("cancel", unknown, "--redis", server.url).code == 2
    assert rankmill("cancel", run.id, "--redis", server.url).code == 0
    assert rankmill("cancel", run.id, "--redis", server.url).code == 2


def strings_of(found: object) -> list[str]:
    """All texts of what JSON says."""
    if isinstance(found, str):
        return [found]
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [text for value in values for text in strings_of(value)]


def test_what_comes_from_redis_cannot_command_the_terminal(server: Server) -> None:
    """A worker's name, device and reasons, the device of the accounts, and a run's errors."""
    evil = "x\x1b[2J\x9b31m\x7f\u202egpj\u2066"
    report = WorkerReport(device=evil, started=1, beat=1, refusals=(evil,), models=(evil,))
    client = server.client
    client.sadd("rq:workers", f"rq:worker:{evil}")
    client.hset(f"rq:worker:{evil}", "birth", "2026-01-01T00:00:00Z")
    announce_worker(client, evil, report, ttl=60)
    run = new_run(ScoreSpec(model=evil), queue="q", ttl=60, max_retries=1)
    accountant, store = Accountant(), RunStore(client)
    store.restore(run)
    with client.pipeline() as pipe:
        accountant.count(pipe, run, {"1-0": {evil: Amounts(pairs=1)}})
        pipe.execute()
    client.rpush(keys.errors(run.id), RowError(row=1, error=evil, attempts=1, worker=evil).written())
    commands = ["status", "runs", "workers", "usage", "jobs", f"errors {run.id}"]
    for command in [each.split() for name in commands for each in (name, f"{name} --json")]:
        done = rankmill(*command, "--redis", server.url)
        assert done.code == 0, done.err
        assert not [sign for sign in done.out + done.err if sign != "\n" and not sign.isprintable()], command
        if "--json" in command and "gpj" in done.out:
            assert evil in strings_of(json.loads(done.out))
    assert plain("a\x1b[2Jb\nc") == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c"


@pytest.mark.parametrize("form", ["json", "human"])
def test_a_log_cannot_command_the_terminal(form: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info", form)
    logging.getLogger("rankmill").warning("left to others: %s", "x\x1b[2J\x9b31m\u202egpj")
    told = capsys.readouterr().err
    assert "gpj" in told
    assert not [sign for sign in told if sign != "\n" and not sign.isprintable()]
    if form == "json":
        assert json.loads(told)["message"] == "left to others: x\x1b[2J\x9b31m\u202egpj"


def test_the_help_of_score_file_has_what_most_people_need_first() -> None:
    text = rankmill("score", "--help").out
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:2] == ["Most used:", "Input:"]
    assert titles[-1] == "Other options:"
    first = text[text.index("Most used:") : text.index("Input:")]
    for option in ("--output", "--model", "--top-k", "--query-column", "--passage-column"):
        assert option in first
    command = command_line.get_command(Context(command_line), "score")
    assert command
    known = {option.name for option in command.params}
    listed = [name for names in GROUPS.values() for name in names.split()]
    assert set(listed) - known == {"file_queue"}, "only submit has it"
    assert known - set(listed) == {
        "inputs", "config", "verify", "estimate", "sample", "as_json", "quiet", "verbose", "version",
    }  # fmt: skip
