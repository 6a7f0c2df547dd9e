"""What docs/explanation/guarantees.md names is there: each promise has its test, each name its place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from rankmill.jobs.runtime.settings import Settings, WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", GUARANTEES)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_each_named_test_is_there(file: str, test: str) -> None:
    found = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert test in found or not test


def test_each_fault_has_a_test() -> None:
    tables = re.findall(r"^\| what happens \|.*\n\|[ -|]*\n((?:\|.*\n)+)", GUARANTEES, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+`", row)] == []


def test_settings_metrics_and_alerts_have_these_names() -> None:
    words = set(re.findall(r"`([\w-]+)`", GUARANTEES))
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert {word for word in words if word.startswith("rankmill_") and f"`{word}`" not in metrics} == set()
    alerts = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text())
    known = {rule.get("alert") for group in alerts["groups"] for rule in group["rules"]}
    assert {word for word in words if word.startswith("Rankmill")} <= known
    ours = {*Settings.model_fields, *WorkerSettings.model_fields}
    named = {word for word in words if re.fullmatch(r"\w+_(seconds|retries|ttl)|window", word)}
    assert named
    assert named <= ours
