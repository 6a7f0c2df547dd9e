"""Reports how a worker of this host would run a model, from the model's small files, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec, choose_output
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.backends.auto import backends, choose_device
from rankmill.workers.models.description import Description, describe
from rankmill.workers.models.loading import ANY_LENGTH, find_max_length, one_line
from rankmill.workers.models.prompts import answers, prompt_template, tokenizer_for
from rankmill.workers.models.sources import ModelCopies, find_source

_SAMPLE = "QUERY", "PASSAGE"


def report(request: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model, and how a worker of this host would run it.

    The request is ``{"spec": {...}}``. The answer has these fields:

    - ``model``, ``revision``: the model's name, and its commit on the hub or the digest of its files.
    - ``family``, ``kind``: transformers' model type, and how the model makes a score.
    - ``pooling``: which tokens' outputs make the score, such as ``cls``.
    - ``outputs``: names of the outputs.
    - ``activation``: dotted path of the activation function that the model was saved with, if any.
    - ``max_length``: most tokens of a pair; ``None`` if any number is allowed.
    - ``instruction``, ``prompts``: the instruction in use, and the model's own instructions by name.
    - ``prompt``: the text that the model reads for a pair, with the words QUERY and PASSAGE; ``None`` if it
      reads the two texts as they are.
    - ``refused``: why workers cannot score with the model and these settings; ``None`` if they can.
    - ``device``: the device of this host that workers would use.
    - ``backends``: for each backend and precision, why it cannot run the model here; ``None`` if it can.

    Raises
    ------
    SpecError
        The model does not exist, or its files are damaged.
    ConfigError
        The settings' device does not exist here.
    """
    spec = ScoreSpec.model_validate(request["spec"])
    with one_line(spec):
        settings = load_settings()
        copies = ModelCopies(settings)
        cache = copies.folder
        located = find_source(spec, copies, cache)
        revision = located.revision
        description = describe(located.files, revision, cache)
        device = choose_device(settings.device, "torch")
        return {
            "model": spec.model,
            "revision": revision,
            "family": description.config.model_type,
            "kind": _kind(description),
            "pooling": _pooling(description),
            "outputs": list(description.labels),
            "activation": description.layout.activation,
            "max_length": None if (most := find_max_length(spec, description)) == ANY_LENGTH else most,
            "instruction": description.layout.prompt if spec.instruction is None else spec.instruction,
            "prompts": description.layout.prompts,
            "refused": _refusal(spec, description),
            "prompt": _prompt(spec, description),
            "device": device,
            "backends": _backends(description, device),
        }


def _kind(description: Description) -> str:
    layout = description.layout
    if layout.task == "causal":
        return "language model whose answers are the score"
    if layout.task == "chain":
        return "transformer, then " + ", ".join(step.kind for step in layout.steps)
    return "language model with a head" if description.is_language_model else "sequence classifier"


def _pooling(description: Description) -> str:
    modes = [step.config.get("pooling_mode", "as configured") for step in description.layout.steps]
    poolings = [
        mode for step, mode in zip(description.layout.steps, modes, strict=True) if step.kind == "Pooling"
    ]
    if poolings:
        return ", ".join(map(str, poolings))
    if description.is_language_model:
        return "last token"
    return str(getattr(description.config, "classifier_pooling", None) or "as its family does")


def _refusal(spec: ScoreSpec, description: Description) -> str | None:
    """Return the reason why workers cannot score with a model and this spec; ``None`` if they can."""
    try:
        if not spec.all_labels:
            choose_output(spec.label, description.labels, spec.model)
        tokenizer_for(spec, description, find_max_length(spec, description))
        if description.layout.task == "causal":
            answers(spec, description)
    except SpecError as error:
        return str(error)
    return None


def _prompt(spec: ScoreSpec, description: Description) -> str | None:
    """Return the prompt that a model reads for a sample pair, or ``None`` if it has no prompt template."""
    try:
        if prompt_template(spec, description) is None:
            return None
        tokenizer: Any = tokenizer_for(spec, description, find_max_length(spec, description))
        texts: list[str] = tokenizer.rendered([_SAMPLE[0]], [_SAMPLE[1]])
    except SpecError:  # `_refusal` reports the error
        return None
    return texts[0]


def _backends(description: Description, device: str) -> dict[str, dict[str, str | None]]:
    """For each backend and precision, return why it cannot run a model on `device`, or ``None``."""
    obstacles: dict[str, dict[str, str | None]] = {}
    for name, kind in backends().items():
        precisions = kind.precisions.get(device) or ("auto",)
        obstacles[name] = {
            precision: kind.obstacle(description.config, device, precision, plain=description.plain)
            for precision in precisions
        }
    return obstacles
