"""Checks that the devices of this host compute a model's scores correctly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.settings import load_settings
from rankmill.workers.backends.base import OutOfMemory
from rankmill.workers.engine.proving import load_proven
from rankmill.workers.host.device import devices, use_threads
from rankmill.workers.models.sources import ModelCopies


def prove(request: Mapping[str, Any]) -> dict[str, Any]:
    """Check that each device of this host computes a model's scores correctly. A stored proof (an earlier
    passed check) is used again.

    The request is ``{"spec": {...}}``. In the answer, ``proofs`` has the fields of a
    `rankmill.jobs.contract.proof.Proof` for each device that passes, and ``refused`` has the reason for each
    other device.
    """
    spec = ScoreSpec.model_validate(request["spec"])
    settings = load_settings()
    use_threads(settings.threads)
    copies = ModelCopies(settings)
    proofs: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for device in devices():
        try:
            loaded = load_proven(spec, device, settings.backend, settings.cache_dir, copies)
        except SpecError as error:
            refused[device] = str(error)
        except (MemoryError, OutOfMemory):
            refused[device] = f"there is not enough memory to load model {spec.model}"
        else:
            assert loaded.proof
            proofs[device] = loaded.proof.model_dump()
    return {"proofs": proofs, "refused": refused}
