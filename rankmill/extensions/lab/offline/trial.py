"""Tries a model by loading it as a worker does and scoring some of the shipped pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankmill.jobs.cache import temporary_folder
from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.home import shipped
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import OutOfMemory
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host.device import use_threads
from rankmill.workers.models.probes import Probe, columns_of

_PAIRS = shipped("examples", "pairs.jsonl")
_SCORED = 48
_TOKEN_BUDGET = 2048


def trial(request: Mapping[str, Any]) -> dict[str, Any]:
    """Try a model with PyTorch on the CPU, where every supported model runs.

    The request is ``{"spec": {...}}``, and the answer is ``{"family": ...}``.

    Raises
    ------
    SpecError
        The model cannot be loaded, fails at a pair, or gives all pairs the same score.
    """
    spec = ScoreSpec.model_validate(request["spec"])
    use_threads("auto")
    with temporary_folder("rankmill-trial-") as cache:
        try:
            loaded = load_proven(spec, "cpu", "torch", str(cache))
            rows = [json.loads(line) for line in _PAIRS.read_text(encoding="utf-8").splitlines()[:_SCORED]]
            engine = Engine(loaded.model(spec), _TOKEN_BUDGET)
            pairs = [Probe(row["query"], row["passage"]) for row in rows]
            scored = engine.score(*columns_of(pairs, spec.inputs))
        except (MemoryError, OutOfMemory):
            raise SpecError("there is not enough memory to load it") from None
    if scored.errors:
        raise SpecError(f"a pair of the examples has no score: {next(iter(scored.errors.values()))}")
    if not np.ptp(scored.scores):
        raise SpecError(f"it gives all pairs of the examples the same score, {scored.scores[0]:g}")
    return {"family": loaded.about.config.model_type}
