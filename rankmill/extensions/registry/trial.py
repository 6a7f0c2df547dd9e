"""Describes, tries or proves a model on this host, in a process that imports a worker's packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rankmill.extensions.lab.ask import ask
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.proof import Proof
from rankmill.jobs.runtime.settings import Settings


def try_model(folder: Path, settings: Settings, *, seconds: float | None = None) -> str:
    """Check that workers can score with the model in a folder, by scoring example pairs. Returns
    transformers' model type.

    Parameters
    ----------
    folder, settings
        The folder, and the settings, which say how pairs are scored.
    seconds
        Longest time for this; ``None`` for no limit.

    Raises
    ------
    InputError
        Workers cannot score with the model; the message says why.
    ProcessFailed
        The process was killed, or the time was over.
    ConfigError
        A package of a worker is missing.
    """
    spec = settings.spec().model_copy(
        update={"model": str(folder.resolve()), "revision": None, "precision": "fp32"}
    )
    try:
        request = {"spec": spec.model_dump()}
        answer = ask("trial", request, f"the trial of {folder}", settings, seconds=seconds)
    except InputError as error:
        raise InputError(f"{folder} cannot be pushed: {error}") from None
    return str(answer["family"])


class Proven(BaseModel):
    """The proofs that devices of this host compute a model's scores correctly, by device. ``refused`` has the
    reason for each device that fails.
    """

    proofs: dict[str, Proof]
    refused: dict[str, str]


def prove_model(settings: Settings) -> Proven:
    """Prove that the devices of this host compute a model's scores correctly. `settings` name the model, and
    how it is scored. Raises the errors of `model_report`.
    """
    request = {"spec": settings.spec().model_dump()}
    return Proven.model_validate(ask("prove", request, "proving the model", settings))


def model_report(settings: Settings) -> dict[str, Any]:
    """Describe the model that the settings name, and how a worker on this host would run it, as
    `rankmill.extensions.lab.offline.report` does.

    Raises
    ------
    InputError
        The model or the settings' device does not exist, or the model's files are damaged.
    ProcessFailed
        The process was killed.
    ConfigError
        A package of a worker is missing.
    """
    return ask("report", {"spec": settings.spec().model_dump()}, "looking at the model", settings)
