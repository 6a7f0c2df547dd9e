"""What Prometheus and Grafana are configured with, tried with a real Prometheus and a real worker."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import yaml

from rankmill import Client
from rankmill.cluster.verdict import fault_kinds
from tests.cluster.test_exporter import FRESH
from tests.conftest import Server, StartExporter, StartWorker, wait_for
from tests.harness.tools import free_port, tool
from tests.project.test_rooms import ROOT
from tests.workers.test_metrics import get

CONFIGS = ROOT / "configs" / "prometheus"
ALERTS = [
    rule
    for group in yaml.safe_load((CONFIGS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((ROOT / "configs" / "grafana" / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize(
    "command", ["check rules alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"]
)
def test_the_rules_and_their_tests_hold(command: str) -> None:
    done = subprocess.run(
        [tool("promtool", "prometheus"), *command.split()],
        cwd=CONFIGS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_has_its_section_in_the_runbook() -> None:
    sections = {
        line[3:].strip()
        for line in (ROOT / "docs" / "operations" / "runbook.md").read_text().splitlines()
        if line[:3] == "## "
    }
    cases = [
        case
        for test in yaml.safe_load((CONFIGS / "alerts_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    for alert in ALERTS:
        name = alert["alert"]
        assert name in sections
        page, _, place = alert["annotations"]["runbook_url"].partition("#")
        assert (page, place) == ("{{ $externalURL }}/consoles/runbook.html", name.lower())
        assert {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name} == {True, False}


OWN_ALERTS = {
    "wrong_scores": "RankmillWrongScores",
    "refuses_writes": "RankmillRedisDown",
    "no_workers": "RankmillNoWorkers",
    "no_runners": "RankmillNoRunners",
    "lost_worker": "RankmillHeartbeatGap",
    "slow_worker": "RankmillWorkerSlow",
    "failed_jobs": "RankmillChunksFailed",
}
"""Kinds of faults whose alerts look at other metrics; they are tested in alerts_test.yml."""


def test_every_kind_of_fault_has_an_alert_and_is_in_the_runbook(tmp_path: Path) -> None:
    assert set(OWN_ALERTS.values()) <= {rule["alert"] for rule in ALERTS}
    kinds = fault_kinds()
    others = [kind for kind in kinds if kind not in OWN_ALERTS]
    told = [
        {
            "exp_labels": {"severity": "warning", "kind": kind},
            "exp_annotations": {
                "summary": f"rankmill status names a fault of kind {kind}",
                "runbook_url": "http://there/consoles/runbook.html#rankmillfault",
            },
        }
        for kind in others
    ]
    case = {"eval_time": "1m", "alertname": "RankmillFault", "exp_alerts": told}
    series = [{"series": f'rankmill_faults{{kind="{kind}"}}', "values": "1x20"} for kind in kinds]
    test = {
        "interval": "15s",
        "external_url": "http://there",
        "input_series": series,
        "alert_rule_test": [case],
    }
    rules = tmp_path / "test.yml"
    rules.write_text(json.dumps({"rule_files": [str(CONFIGS / "alerts.yml")], "tests": [test]}))
    done = subprocess.run(
        [tool("promtool", "prometheus"), "test", "rules", rules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runbook = (ROOT / "docs" / "operations" / "runbook.md").read_text()
    assert [kind for kind in others if f"`{kind}`" not in runbook] == []


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are() -> None:
    """docs/reference/metrics.md lists every metric; tests/project/test_reference.py holds it to that."""
    known = set(
        re.findall(r"^\| `(rankmill_\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.M)
    )
    asked = {
        re.sub("_(bucket|sum|count)$", "", name)
        for query in [*QUERIES, *(rule["expr"] for rule in ALERTS)]
        for name in re.findall(r"\brankmill_\w+", query)
    }
    assert len(asked) > 20
    assert asked <= known, asked - known


class Prometheus:
    """A real one, and what it knows."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        status, text = get(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        assert status == 200, text
        return json.loads(text)["data"]

    def values(self, query: str) -> list[float]:
        """What the query says now, without what is not a number."""
        found = self.ask("query", query=query.replace("$__rate_interval", "1m"))["result"]
        return [value for sample in found if math.isfinite(value := float(sample["value"][1]))]


@pytest.fixture
def prometheus(
    server: Server,
    workers: StartWorker,
    exporters: StartExporter,
    tmp_path: Path,
) -> Iterator[Prometheus]:
    """Prometheus by the configuration that is shipped, but for ports and intervals, with one worker."""
    program = tool("prometheus", "prometheus")
    exporter = exporters(server.url, before=FRESH)
    workers(environ={"RANKMILL_METRICS_ADDRESS": f"127.0.0.1:{free_port()}"})
    text = (CONFIGS / "prometheus.yml").read_text().replace("exporter:9807", exporter.removeprefix("http://"))
    config = tmp_path / "prometheus.yml"
    config.write_text(re.sub(r": 15s\b", ": 250ms", text))
    (tmp_path / "alerts.yml").write_text((CONFIGS / "alerts.yml").read_text())
    with running_prometheus(program, config) as url:
        yield Prometheus(url)


@contextmanager
def running_prometheus(program: str, config: Path) -> Iterator[str]:
    """A Prometheus by its configuration; its URL."""
    folder, url = config.parent, f"127.0.0.1:{free_port()}"
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={url}",
        f"--web.external-url=http://{url}",
        f"--web.console.templates={CONFIGS / 'consoles'}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    wait_for(lambda: "ready to receive" in (folder / "prometheus.log").read_text(), process)
    yield f"http://{url}"
    process.terminate()
    process.wait(timeout=60)


def test_an_alert_reaches_its_receiver_with_an_address_that_opens(tmp_path: Path) -> None:
    """The shipped files but for ports and times, with a receiver as their comment shows one; no exporter."""
    alertmanager = tool("prometheus-alertmanager", "prometheus-alertmanager")
    reached = Queue[dict[str, dict[str, str]]]()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                reached.put(alert)
            self.send_response(200)
            self.end_headers()

    told = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    text = (ROOT / "configs" / "alertmanager" / "alertmanager.yml").read_text()
    text = text.replace("# webhook_configs:", "webhook_configs:").replace("#   - url:", "  - url:")
    text = text.replace("https://example.org/alerts", f"http://127.0.0.1:{told.server_port}")
    (tmp_path / "alertmanager.yml").write_text(text.replace("group_wait: 15s", "group_wait: 100ms"))
    address = f"127.0.0.1:{free_port()}"
    for name in ("prometheus.yml", "alerts.yml", "alertmanagers.yml"):
        text = (CONFIGS / name).read_text().replace("alertmanager:9093", address)
        text = re.sub(r"interval: 15s\b", "interval: 250ms", text)
        (tmp_path / name).write_text(text.replace("for: 1m", "for: 0s"))
    options = [f"--config.file={tmp_path / 'alertmanager.yml'}", f"--storage.path={tmp_path}"]
    threading.Thread(target=told.serve_forever, daemon=True).start()
    with (
        told,
        (tmp_path / "alertmanager.log").open("wb") as log,
        running_prometheus(tool("prometheus", "prometheus"), tmp_path / "prometheus.yml"),
    ):
        process = subprocess.Popen(
            [alertmanager, *options, f"--web.listen-address={address}", "--cluster.listen-address="],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            alert = reached.get(timeout=200)
            assert alert["labels"]["alertname"] == "RankmillExporterDown"
            page, _, place = alert["annotations"]["runbook_url"].partition("#")
            assert get(page) == (200, (CONFIGS / "consoles" / "runbook.html").read_text())
            assert f'id="{place}"' in get(page)[1]
        finally:
            process.terminate()
            process.wait(timeout=60)
            told.shutdown()


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_an_answer(
    prometheus: Prometheus, server: Server, tiny_model: Path
) -> None:
    wait_for(lambda: prometheus.values('up{job="rankmill-worker"}') == [1])
    wait_for(lambda: prometheus.values("rankmill_cluster_chunks_total") == [0])
    wait_for(lambda: prometheus.values("count_over_time(rankmill_pairs_total[1m]) > 1"))
    client = Client(server.url, model=str(tiny_model), chunk_size=10)
    pairs = [("big cat", f"moon river {number}") for number in range(200)]
    left = set(QUERIES)

    def all_answered() -> bool:
        client.score(pairs, timeout=60)
        left.difference_update([query for query in left if prometheus.values(query)])
        return all(
            re.search("rankmill_(gpu|gateway)_|ALERTS|faults", query) for query in left
        )  # none is here

    assert len(QUERIES) > 30
    wait_for(all_answered)
    wait_for(
        lambda: (
            [rule["health"] for rule in prometheus.ask("rules")["groups"][0]["rules"]] == ["ok"] * len(ALERTS)
        )
    )


@pytest.mark.slow
def test_chunks_that_wait_for_no_worker_are_noticed(
    prometheus: Prometheus, server: Server, tiny_model: Path
) -> None:
    Client(server.url, model=str(tiny_model), queue="lonely").submit([("big cat", "moon")])
    alert = 'ALERTS{alertname="RankmillNoWorkers",queue="lonely"}'
    wait_for(lambda: prometheus.values(alert) == [1])
