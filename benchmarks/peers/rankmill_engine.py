"""Runs rankmill's engine in process, without queue or files, in the project's own environment.

Variants are precisions; int8 is the kind that is worth it on the machine, or else what auto is.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from contract import Loaded, arguments, measure

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import resolve_device, use_threads
from rankmill.workers.models.loading import load_model


def load(args: argparse.Namespace) -> Loaded:
    """The engine as a worker makes it with default settings."""
    use_threads("auto")
    device = resolve_device("auto")
    spec = ScoreSpec(model=str(args.model), precision=args.variant)
    engine = Engine(load_model(spec, device), first_budget("auto", device))
    backend = engine.model.backend

    def score(queries: list[str], passages: list[str]) -> object:
        return engine.score(queries, passages).scores

    return Loaded(
        score,
        backend.precision,
        f"{backend.device}, {backend.name}, {backend.precision}, {engine.size.token_budget} tokens a batch",
    )


if __name__ == "__main__":
    optional = ["openvino"] if find_spec("openvino") else []
    measure(arguments(choices=["auto", "int8"]), load, ["rankmill", "transformers", "torch", *optional])
