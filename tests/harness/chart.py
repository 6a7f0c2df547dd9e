"""The Helm chart, rendered by Helm's library in a process of its own: Go's runtime stays out of the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "configs" / "helm"
RELEASE, NAMESPACE = "mill", "scores"

_RENDER = """
import json, sys
import helm_python as helm
path, release, namespace, values = sys.argv[1:]
values = json.loads(values)
try:
    rendered = helm.Chart.load(path).render(values, name=release, namespace=namespace)
    report = helm.lint(path, values, strict=True, namespace=namespace)
except helm.HelmError as error:
    print(error)
    sys.exit(1)
wrong = [each["error"] for each in report["messages"] if each["severity"] > 1] + report["errors"]
print(json.dumps({"rendered": rendered, "wrong": wrong}))
"""


class NotRendered(Exception):
    """Helm refuses the values, and says why."""


def rendered(**values: Any) -> list[dict[str, Any]]:
    """All objects of the chart with these values.

    Raises `NotRendered`, also for what ``helm lint --strict`` finds.
    """
    return [
        document
        for name, text in _helm(json.dumps(values)).items()
        if not name.endswith(".txt")
        for document in yaml.safe_load_all(text)
        if document is not None
    ]


@cache
def _helm(values: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _RENDER, str(CHART), RELEASE, NAMESPACE, values],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NotRendered(done.stdout or done.stderr)
    answer = json.loads(done.stdout)
    if answer["wrong"]:
        raise NotRendered(str(answer["wrong"]))
    made: dict[str, str] = answer["rendered"]
    return made


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' specs, by the part that each is."""
    return {
        found["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: found["spec"][
            "template"
        ]["spec"]
        for found in documents
        if "template" in found.get("spec", {})
    }


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    """The variables of a pod's one container: a text, or where it comes from."""
    (container,) = pod["containers"]
    found = {each["name"]: each.get("value", each.get("valueFrom")) for each in container.get("env", [])}
    assert len(found) == len(container.get("env", [])), "a variable is there twice"
    return found
