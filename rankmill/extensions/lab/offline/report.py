"""Reports how a worker of this host would run a model, from the model's small files, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec, choose_output
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.backends.registry import backends, choose_device
from rankmill.workers.models.copies import ModelCopies
from rankmill.workers.models.description import Description, describe
from rankmill.workers.models.loading import ANY_LENGTH, find_max_length, one_line
from rankmill.workers.models.prompts import answers, prompt_template, tokenizer_for
from rankmill.workers.models.sources import find_source

_SAMPLE = "QUERY", "PASSAGE"


def report(request: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the model of a request; the answer has the fields of `ModelReport`.

    The request is ``{"spec": {...}}``.

    Raises
    ------
    SpecError
        The model does not exist, or its files are damaged.
    """
    spec = ScoreSpec.model_validate(request["spec"])
    with one_line(spec):
        settings = load_settings()
        copies = ModelCopies(settings)
        cache = copies.folder
        found = find_source(spec, copies, cache)
        revision = found.revision
        about = describe(found.files, revision, cache)
        device = choose_device(settings.device, "torch")
        return {
            "model": spec.model,
            "revision": revision,
            "family": about.config.model_type,
            "kind": _kind(about),
            "pooling": _pooling(about),
            "outputs": list(about.labels),
            "activation": about.layout.activation,
            "max_length": None if (most := find_max_length(spec, about)) == ANY_LENGTH else most,
            "instruction": about.layout.prompt if spec.instruction is None else spec.instruction,
            "prompts": about.layout.prompts,
            "refused": _refusal(spec, about),
            "prompt": _prompt(spec, about),
            "device": device,
            "backends": _backends(about, device),
        }


def _kind(about: Description) -> str:
    layout = about.layout
    if layout.task == "causal":
        return "language model whose answers are the score"
    if layout.task == "chain":
        return "transformer, then " + ", ".join(step.kind for step in layout.steps)
    return "language model with a head" if about.is_language_model else "sequence classifier"


def _pooling(about: Description) -> str:
    """The tokens that the score reads, in words."""
    modes = [step.config.get("pooling_mode", "as configured") for step in about.layout.steps]
    found = [mode for step, mode in zip(about.layout.steps, modes, strict=True) if step.kind == "Pooling"]
    if found:
        return ", ".join(map(str, found))
    if about.is_language_model:
        return "last token"
    return str(getattr(about.config, "classifier_pooling", None) or "as its family does")


def _refusal(spec: ScoreSpec, about: Description) -> str | None:
    """Why the model cannot be scored with this spec; ``None`` if it can."""
    try:
        if not spec.all_labels:
            choose_output(spec.label, about.labels, spec.model)
        tokenizer_for(spec, about, find_max_length(spec, about))
        if about.layout.task == "causal":
            answers(spec, about)
    except SpecError as error:
        return str(error)
    return None


def _prompt(spec: ScoreSpec, about: Description) -> str | None:
    """What the model reads of a pair, as text; ``None`` if it reads the two texts as they are."""
    try:
        if prompt_template(spec, about) is None:
            return None
        tokenizer: Any = tokenizer_for(spec, about, find_max_length(spec, about))
        texts: list[str] = tokenizer.rendered([_SAMPLE[0]], [_SAMPLE[1]])
    except SpecError:  # `_refusal` reports this
        return None
    return texts[0]


def _backends(about: Description, device: str) -> dict[str, dict[str, str | None]]:
    """Why each backend cannot run the model here, for each of its precisions; ``None`` if it can."""
    found: dict[str, dict[str, str | None]] = {}
    for name, kind in backends().items():
        precisions = kind.precisions.get(device) or ("auto",)
        found[name] = {
            each: kind.obstacle(about.config, device, each, plain=about.plain) for each in precisions
        }
    return found
