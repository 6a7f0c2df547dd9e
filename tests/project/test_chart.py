"""The Helm chart: what Helm makes of it is valid, is what the values say, and what rankmill understands."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
import yaml

from rankmill.cluster.exporter import ClusterMetrics, ClusterView
from rankmill.jobs.contract.job import worker_command
from rankmill.jobs.runtime.settings import load_settings
from tests.conftest import score_file
from tests.harness.chart import CHART, NAMESPACE, RELEASE, NotRendered, pods, rendered, variables

ROOT = CHART.parents[1]
SENTINEL = "rediss+sentinel://one:26379,two:26379/scores/0?ssl_ca_certs=/etc/rankmill/redis/ca.crt"
ARGS = ["/data/pairs.parquet", "--output", "/data/scores.parquet"]
VALUES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "GPUs, two pools of them": {
        "workers": {
            "cpu": None,
            "gpu": {"replicas": 2, "cacheClaim": "models", "resources": {"limits": {"nvidia.com/gpu": "2"}}},
            "h100": {"variant": "cuda", "settings": {"queue": "large, rankmill", "model": "a/large-one"}},
        },
        "pod": {"nodeSelector": {"pool": "gpus"}, "priorityClassName": "bulk"},
    },
    "KEDA with a Prometheus of its own": {
        "keda": {"enabled": True},
        "monitoring": {"enabled": True},
        "settings": {"queue": "shop"},
    },
    "gateway, keys, runners": {
        "gateway": {
            "replicas": 3,
            "variant": "cpu",
            "settings": {"gateway_open_metrics": True, "gateway_models": ["a", "b"], "gateway_pairs": 10**6},
            "ingress": {"host": "scores.example.org", "className": "nginx", "tlsSecret": "tls"},
        },
        "runner": {"replicas": 2, "claim": "files"},
        "image": {"repository": "registry.example/rankmill", "version": "1.2", "pullSecrets": ["registry"]},
    },
    "Sentinel and TLS": {"redis": {"external": True, "url": SENTINEL, "tlsSecret": "redis-tls"}},
    "the server's address in the Secret": {"redis": {"external": True}, "secret": "theirs"},
    "a file": {"scoreFile": {"args": ARGS}},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_helm_makes_is_valid_confined_limited_and_watched(name: str) -> None:
    documents = rendered(**VALUES[name])
    for document in documents:
        if not document["apiVersion"].startswith("keda.sh/"):  # its schemas are no part of Kubernetes
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    for part, pod in pods(documents).items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["enableServiceLinks"]  # variables of a service rankmill-… would look like settings
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if name != "GPUs, two pools of them":  # whose resources are the test's
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
        assert part == "score-file" or {"livenessProbe", "readinessProbe"} <= set(container)
        volumes = {volume["name"] for volume in pod["volumes"]} | ({"data"} if part == "valkey" else set())
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", VALUES)
def test_the_home_is_a_folder_of_its_user(name: str, tmp_path: Path) -> None:
    """Everybody may write to an emptyDir itself, and a worker trusts no cache below such a folder."""
    (volume := tmp_path / "volume").mkdir()
    volume.chmod(0o777)
    for part, pod in pods(rendered(**VALUES[name])).items():
        mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
        if part in ("valkey", "prometheus", "grafana"):
            continue  # they are not rankmill's
        assert mounts["/home/rankmill"] == {"name": "home", "mountPath": "/home/rankmill", "subPath": "home"}
        (first,) = pod["initContainers"]
        assert first["image"] == pod["containers"][0]["image"]
        assert first["securityContext"] == pod["containers"][0]["securityContext"]
        assert first["volumeMounts"] == [{"name": "home", "mountPath": "/volume"}]
        for _ in range(2):  # also when the pod's node starts anew
            subprocess.run([part.replace("/volume", str(volume)) for part in first["command"]], check=True)
        assert stat.S_IMODE((volume / "home").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", VALUES)
def test_what_refers_to_another_object_finds_it(name: str) -> None:
    documents = rendered(**VALUES[name])
    labels = [
        found["spec"]["template"]["metadata"]["labels"]
        for found in documents
        if "template" in found.get("spec", {})
    ]
    names = {(found["kind"], found["metadata"].get("name")) for found in documents}
    for found in documents:
        if found["kind"] in ("Service", "PodDisruptionBudget"):
            selector = found["spec"]["selector"].get("matchLabels", found["spec"]["selector"])
            assert sum(selector.items() <= each.items() for each in labels) == 1
        if found["kind"] == "ScaledObject":
            assert ("Deployment", found["spec"]["scaleTargetRef"]["name"]) in names
        if found["kind"] == "Ingress":
            (rule,) = found["spec"]["rules"]
            assert ("Service", rule["http"]["paths"][0]["backend"]["service"]["name"]) in names
    for pod in pods(documents).values():
        for volume in pod["volumes"]:
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names
        host = variables(pod).get("REDIS_HOST", "")
        assert not host or ("Service", host.removesuffix(":6379")) in names


@pytest.mark.parametrize("name", VALUES)
def test_rankmill_takes_the_settings(name: str) -> None:
    for pod in pods(rendered(**VALUES[name])).values():
        given = {key: text for key, text in variables(pod).items() if isinstance(text, str)}
        load_settings(environ={key: text.replace("$(POD_IP)", "10.0.0.1") for key, text in given.items()})


def test_settings_of_a_part_go_before_those_of_all_even_if_false_or_zero() -> None:
    documents = rendered(
        settings={"length_aware": True, "batch_wait_ms": 5, "token_budget": 1000000, "queue": "shop"},
        workers={"cpu": {"settings": {"length_aware": False, "batch_wait_ms": 0}}, "two": {"replicas": 0}},
        env={"HF_HUB_OFFLINE": "1"},
    )
    own, other = (variables(pods(documents)[part]) for part in ("worker-cpu", "worker-two"))
    names = ("RANKMILL_LENGTH_AWARE", "RANKMILL_BATCH_WAIT_MS", "RANKMILL_TOKEN_BUDGET", "HF_HUB_OFFLINE")
    assert [own[name] for name in names] == ["false", "0", "1000000", "1"]
    assert [other[name] for name in names] == ["true", "5", "1000000", "1"]
    assert variables(pods(documents)["gateway"])["RANKMILL_QUEUE"] == "shop"
    assert [
        found["spec"]["replicas"]
        for found in documents
        if (found["kind"], found["metadata"]["name"]) == ("Deployment", f"{RELEASE}-worker-two")
    ] == [0]


def test_workers_start_by_the_usual_command_on_their_settings_queues() -> None:
    started = pods(rendered(**VALUES["GPUs, two pools of them"]))
    workers = {part: pod["containers"][0] for part, pod in started.items() if part.startswith("worker-")}
    assert {part: " ".join(each["args"]) for part, each in workers.items()} == {
        "worker-gpu": worker_command("rankmill"),
        "worker-h100": worker_command("large rankmill"),
    }
    assert {each["image"] for each in workers.values()} == {"rankmill:cuda"}
    assert started["worker-gpu"]["tolerations"]
    assert started["worker-gpu"]["nodeSelector"] == {"pool": "gpus"}
    assert variables(started["worker-gpu"])["RANKMILL_DEVICE"] == "cuda"


def test_a_server_of_one_s_own_is_reached_as_its_url_says() -> None:
    documents = rendered(**VALUES["Sentinel and TLS"])
    assert not [found for found in documents if found["metadata"]["name"].endswith("valkey")]
    for pod in pods(documents).values():
        own = variables(pod)
        assert (own["REDIS_URL"], own["RQ_REDIS_URL"]) == (SENTINEL, "$(REDIS_URL)")
        assert list(own).index("REDIS_URL") < list(own).index("RQ_REDIS_URL")  # else it is not replaced
        assert "REDIS_PASSWORD_FILE" not in own
        mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
        (volume,) = [each for each in pod["volumes"] if each["name"] == mounts["/etc/rankmill/redis"]]
        assert volume["secret"] == {"secretName": "redis-tls"}
    for pod in pods(rendered(**VALUES["the server's address in the Secret"])).values():
        assert variables(pod)["REDIS_URL"] == {"secretKeyRef": {"name": "theirs", "key": "redis_url"}}


def test_images_come_from_the_registry_in_their_release_and_variant() -> None:
    started = pods(rendered(**VALUES["gateway, keys, runners"]))
    images = {part: pod["containers"][0]["image"] for part, pod in started.items() if part != "valkey"}
    variants = {
        "gateway": "cpu",
        "worker-cpu": "cpu",
        "worker-gpu": "cuda",
        "exporter": "base",
        "runner": "base",
    }
    assert images == {part: f"registry.example/rankmill:1.2-{variant}" for part, variant in variants.items()}
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in started.values())


def test_the_secret_gives_keys_to_those_who_need_them() -> None:
    keys = {
        part: {text["secretKeyRef"]["key"] for text in variables(pod).values() if "secretKeyRef" in text}
        for part, pod in pods(rendered(**VALUES["gateway, keys, runners"])).items()
    }
    assert keys == {
        "exporter": {"page_admin_key"}, "valkey": set(), "gateway": {"gateway_api_key"},
        "runner": {"webhook_secret"}, "worker-cpu": {"hf_token"}, "worker-gpu": {"hf_token"},
    }  # fmt: skip


def test_the_scaler_asks_for_metrics_that_there_are_from_any_namespace() -> None:
    documents = rendered(**VALUES["KEDA with a Prometheus of its own"])
    services = {
        f"http://{found['metadata']['name']}.{NAMESPACE}.svc:{found['spec']['ports'][0]['port']}"
        for found in documents
        if found["kind"] == "Service"
    }
    (scaled,) = [found["spec"] for found in documents if found["kind"] == "ScaledObject"]
    (deployment,) = [
        found for found in documents
        if found["kind"] == "Deployment" and found["metadata"]["name"] == scaled["scaleTargetRef"]["name"]
    ]  # fmt: skip
    assert "replicas" not in deployment["spec"]  # else each upgrade would undo what the scaler did
    known = {metric.name for metric in ClusterMetrics(ClusterView(redis.Redis())).describe()}
    for trigger in scaled["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metadata"]["serverAddress"] in services
        (asked,) = re.findall(r"rankmill_\w+", trigger["metadata"]["query"])
        assert asked in known
        assert '{queue=~"shop"}' in trigger["metadata"]["query"]


def test_prometheus_finds_the_services_and_grafana_finds_prometheus() -> None:
    monitoring = {"enabled": True, "alertmanagers": ["alertmanager.monitoring:9093"]}
    documents = rendered(**VALUES["KEDA with a Prometheus of its own"] | {"monitoring": monitoring})
    services = {
        f"{found['metadata']['name']}:{found['spec']['ports'][0]['port']}"
        for found in documents
        if found["kind"] == "Service"
    }
    files = {
        key: text
        for found in documents
        if found["kind"] == "ConfigMap"
        for key, text in found["data"].items()
    }
    assert files.keys() == {
        "prometheus.yml",
        "alerts.yml",
        "alertmanagers.yml",
        "runbook.html",
        "datasources.yml",
        "dashboards.yml",
        "dashboard.json",
    }
    assert json.loads(files["dashboard.json"]) == json.loads(
        (ROOT / "configs/grafana/dashboard.json").read_text()
    )
    assert yaml.safe_load(files["alerts.yml"]) == yaml.safe_load(
        (ROOT / "configs/prometheus/alerts.yml").read_text()
    )
    (told,) = yaml.safe_load(files["alertmanagers.yml"])
    assert told == {"targets": ["alertmanager.monitoring:9093"]}
    scrapes = yaml.safe_load(files["prometheus.yml"])["scrape_configs"]
    asked = {
        target
        for scrape in scrapes
        for each in scrape.get("static_configs", [])
        for target in each["targets"]
    }
    asked |= {each["url"].split("/")[2] for scrape in scrapes for each in scrape.get("http_sd_configs", [])}
    asked |= {each["url"].split("/")[2] for each in yaml.safe_load(files["datasources.yml"])["datasources"]}
    assert len(asked) == 3
    assert asked <= services
    hosts = load_settings(
        environ={"RANKMILL_EXPORTER_HOSTS": variables(pods(documents)["exporter"])["RANKMILL_EXPORTER_HOSTS"]}
    )
    assert f"{RELEASE}-exporter" in hosts.exporter_hosts


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"wrokers": {}}, "wrokers"),
        ({"settings": {"modle": "demo"}}, 'no setting "modle"'),
        ({"gateway": {"settings": {"gateway_api_key": "a-key-of-sixteen-and-more"}}}, "gateway_api_key"),
        ({"redis": {"url": "redis://elsewhere"}}, "/redis/url"),  # not external: it would not be used
        ({"redis": {"external": True, "url": "redis://:secret@there"}}, "/redis/url"),  # is the Secret's
        ({"keda": {"enabled": True}}, "keda.prometheus"),
        ({"workers": {"Big": {}}}, "Big"),
        ({"workers": {"cpu": {"replicas": -1}}}, "/workers/cpu/replicas"),
    ],
)
def test_wrong_values_are_refused_by_their_names(values: dict[str, Any], why: str) -> None:
    with pytest.raises(NotRendered, match=re.escape(why)):
        rendered(**values)


def test_the_chart_has_rankmill_s_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_the_job_s_command_is_one_of_score_file(tiny_model: Path, tmp_path: Path) -> None:
    """What the manifest runs, with the claim in a folder and the cluster's own server embedded."""
    pod = pods(rendered(**VALUES["a file"]))["score-file"]
    program, *arguments = [part.replace("/data", str(tmp_path)) for part in pod["containers"][0]["args"]]
    pq.write_table(pa.table({"query": ["cat"], "passage": ["a cat"]}), tmp_path / "pairs.parquet")
    assert program == "score-file"
    done = score_file(*arguments, "--model", tiny_model, cwd=tmp_path)
    assert done.code == 0, done.err
    assert pq.read_table(tmp_path / "scores.parquet").num_rows == 1
