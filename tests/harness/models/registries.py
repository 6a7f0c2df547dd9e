"""Registries of models for tests."""

from __future__ import annotations

from pathlib import Path

from jobs.registry.documents import Manifest
from jobs.registry.registry import Registry
from rankmill.registry.push import push
from rankmill.registry.steps import Steps
from rankmill.registry.trial import Trial


def put_version(url: str | Path, model: Path, name: str, version: str | None = None) -> Manifest:
    """Push a model without the trial, which takes seconds."""
    trial = Trial(family="bert", backend="torch", precision="fp32")
    return push(Registry(str(url)), model, name, version, lambda folder: trial, Steps()).manifest
