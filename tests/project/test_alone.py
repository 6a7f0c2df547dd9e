"""The core alone: what no extension adds to is whole, and what one would add is missed in one line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import rankmill as face
from rankmill.cli.main import rankmill
from rankmill.cluster.exporter import exporter_app
from rankmill.cluster.snapshot import read_cluster
from rankmill.cluster.verdict import verdict
from rankmill.jobs.contract.errors import ConfigError, RunExpired
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.connection import impatient
from rankmill.jobs.runtime.settings import load_settings
from rankmill.testing import FakeClient
from tests.conftest import Server
from tests.harness.runs import stored_run

pytestmark = pytest.mark.usefixtures("without_extensions")


def test_a_client_scores_and_says_that_it_cannot_submit_files() -> None:
    client = FakeClient()
    assert client.score([("q", "p")], timeout=5).shape == (1,)
    with pytest.raises(ConfigError, match="an extension that is not installed here"):
        client.submit_file("a.csv", "b.csv")
    with pytest.raises(RunExpired, match="there are no results of run"):
        client.attach("s123")


@pytest.mark.parametrize("name", ["AsyncSubmittedFile", "SubmittedFile", "score_file"])
def test_a_name_that_an_extension_has_is_missed_in_one_line(name: str) -> None:
    with pytest.raises(
        ImportError, match=rf"^rankmill\.{name} comes with an extension that is not installed here$"
    ):
        getattr(face, name)


def test_all_other_names_can_be_imported() -> None:
    names: dict[str, object] = {}
    exec("from rankmill import *", names)
    assert {"Client", "RunFailed", "score_pairs"} <= names.keys() == {*face.__all__, "__builtins__"}


def test_commands_have_no_options_of_extensions() -> None:
    for command in ("status", "wait"):
        done = CliRunner().invoke(rankmill, [command, "--help"])
        assert "--redis" in done.output
        assert "--file-queue" not in done.output


def test_help_lists_the_commands_of_the_core() -> None:
    done = CliRunner().invoke(rankmill, ["--help"])
    assert done.exit_code == 0
    assert "\nCluster:\n" in done.output
    assert "\nServe:\n" not in done.output


def test_the_cluster_is_shown(server: Server) -> None:
    store = RunStore(server.client)
    store.enqueue(stored_run(store), {0: Payload(b"pairs", 1)})
    server.client.zadd("rankmill:file-queues", {"files": 1})

    def told(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(rankmill, [*words, "--redis", server.url], env={"COLUMNS": "200"})
        return done.exit_code, " ".join(done.output.split())

    assert verdict(read_cluster(server.client)).faults[0].kind == "no_workers"
    assert "Nothing is scored in queue q: no workers" in told("status")[1]
    assert json.loads(told("status", "--json")[1])["extensions"] == {}
    assert json.loads(told("runs", "--json")[1]).keys() == {"total", "page", "runs"}
    for command, missing in (
        ("status", "there is no submitted run s123"),
        ("wait", "there are no results of run s123"),
        ("cancel", "there is no run s123"),
    ):
        code, text = told(command, "s123")
        assert code == 2
        assert missing in text

    def served(path: str) -> tuple[str, str]:
        began: list[str] = []
        environ = {"PATH_INFO": path, "REQUEST_METHOD": "GET", "QUERY_STRING": ""}
        body = b"".join(app(environ, lambda status, headers: began.append(status)))  # type: ignore[arg-type]
        return began[0], body.decode()

    app = exporter_app(impatient(server.client), load_settings())
    assert served("/")[0].startswith("404")
    state, metrics = served("/metrics")
    assert state.startswith("200")
    assert 'rankmill_faults{kind="no_workers"} 1.0' in metrics
    assert "rankmill_runners" not in metrics
