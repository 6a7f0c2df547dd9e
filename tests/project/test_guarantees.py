"""Each promise of docs/explanation/guarantees.md has its tests, and each name on the page its place."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from rankmill.jobs.runtime.settings import Settings, extension_settings
from tests.harness.reference.shown import promises, rows, shown_by

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()


def test_each_promise_has_tests_for_what_may_happen() -> None:
    assert len(rows()) > 45
    assert {number for numbers in rows().values() for number in numbers} == {*promises()}
    assert rows().keys() - shown_by().keys() == set()


def test_each_test_shows_what_is_promised() -> None:
    assert {row: tests for row, tests in shown_by().items() if row not in rows()} == {}


def test_the_tables_are_read_at_a_glance() -> None:
    cells = [cell for line in GUARANTEES.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert [cell for cell in cells if len(cell) > 100] == []


def test_settings_metrics_and_alerts_have_these_names() -> None:
    words = set(re.findall(r"`([\w-]+)`", GUARANTEES))
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert {word for word in words if word.startswith("rankmill_") and f"`{word}`" not in metrics} == set()
    alerts = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text())
    known = {rule.get("alert") for group in alerts["groups"] for rule in group["rules"]}
    assert {word for word in words if word.startswith("Rankmill")} <= known
    ours = {*Settings.model_fields, *extension_settings()}
    named = {word for word in words if re.fullmatch(r"\w+_(seconds|retries|ttl)|window", word)}
    assert named
    assert named <= ours
