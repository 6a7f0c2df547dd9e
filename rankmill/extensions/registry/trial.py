"""Describes, tries or proves a model on this host, in a process that imports a worker's packages."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from rankmill.extensions.lab.ask import ask
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.proof import Proof
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.settings import Settings


class TriedModel(BaseModel):
    """The result of a successful trial of a model: transformers' model type, and the backend and precision
    that scored.
    """

    family: str
    backend: str
    precision: str


def try_model(folder: Path, settings: Settings, *, seconds: float | None = None) -> TriedModel:
    """Check that workers can score with the model in a folder, by scoring example pairs.

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
    require_worker_packages()
    spec = settings.spec().model_copy(
        update={"model": str(folder.resolve()), "revision": None, "precision": "fp32"}
    )
    try:
        request = {"spec": spec.model_dump()}
        answer = ask("trial", request, f"the trial of {folder}", settings, seconds=seconds)
    except InputError as error:
        raise InputError(f"{folder} cannot be pushed: {error}") from None
    return TriedModel.model_validate(answer)


class ModelReport(BaseModel):
    """Describes a model from its small files, without its weights, and how this host would run it.

    Attributes
    ----------
    model, revision
        The model's name, and its commit on the hub or the digest of its files.
    family, kind
        Transformers' model type, and how the model makes a score.
    pooling
        Which tokens' outputs make the score, such as ``cls``.
    outputs
        Names of the outputs.
    activation
        Dotted path of the activation function that the model was saved with; ``None`` if it has none.
    max_length
        Most tokens of a pair; ``None`` if any number is allowed.
    instruction, prompts
        The instruction in use, and the model's own instructions by name.
    prompt
        The text that the model reads for a pair, with the words QUERY and PASSAGE; ``None`` if it reads the
        two texts as they are.
    refused
        Why workers cannot score with the model and these settings; ``None`` if they can.
    device
        The device of this host that workers would use.
    backends
        For each backend and precision, the reason why it cannot run the model here; ``None`` if it can.
    """

    model: str
    revision: str | None
    family: str
    kind: str
    pooling: str
    outputs: tuple[str, ...]
    activation: str | None
    max_length: int | None
    instruction: str
    prompts: dict[str, str]
    prompt: str | None
    refused: str | None
    device: str
    backends: dict[str, dict[str, str | None]]


class Proven(BaseModel):
    """The proofs that devices of this host compute a model's scores correctly, by device. ``refused`` has the
    reason for each device that fails.
    """

    proofs: dict[str, Proof]
    refused: dict[str, str]


def prove_model(settings: Settings, device: str) -> Proven:
    """Prove that devices of this host compute a model's scores correctly. Raises the errors of
    `model_report`.

    Parameters
    ----------
    settings
        Name the model, and how it is scored.
    device
        The device, or ``all`` for each device.
    """
    require_worker_packages()
    request = {"spec": settings.spec().model_dump(), "device": device}
    return Proven.model_validate(ask("prove", request, "proving the model", settings))


def model_report(settings: Settings) -> ModelReport:
    """Describe the model that the settings name, and how a worker on this host would run it.

    Raises
    ------
    InputError
        The model or the settings' device does not exist, or the model's files are damaged.
    ProcessFailed
        The process was killed.
    ConfigError
        A package of a worker is missing.
    """
    require_worker_packages()
    request = {"spec": settings.spec().model_dump()}
    return ModelReport.model_validate(ask("report", request, "looking at the model", settings))
