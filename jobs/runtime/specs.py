"""The score spec of a run: that of the settings, with the changes that a caller asks for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.prompts import read_template
from rankmill.jobs.contract.spec import ScoreSpec, complaint
from rankmill.jobs.runtime.settings import Settings

_CALL = frozenset({"chunk_size", "columns", "detached", "priority", "timeout", "top_k"})
"""Options of a client's calls beside the fields of the spec, to suggest for a misspelt name."""


def run_spec(settings: Settings, changes: Mapping[str, Any]) -> ScoreSpec:
    """The spec of a run; a model directory gets its absolute path, as workers may run in other folders.

    Raises
    ------
    ConfigError
        A change is unknown or not valid.
    """
    if "prompt_template" in changes:
        changes = {**changes, "prompt_template": read_template(changes["prompt_template"])}
    try:
        spec = ScoreSpec(**{**settings.spec().model_dump(), **changes})
    except ValidationError as error:
        raise ConfigError(complaint(error, {*ScoreSpec.model_fields, *_CALL} - changes.keys())) from None
    is_name = "/" not in spec.model and (spec.model == "demo" or "@" in spec.model)
    with suppress(OSError):  # a mount that is stale, say: workers may see more
        if not is_name and Path(spec.model).is_dir():
            return spec.model_copy(update={"model": str(Path(spec.model).resolve())})
    return spec
