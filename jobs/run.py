"""A run: one submission, and how it is read from Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.errors import WireError
from jobs.spec import ScoreSpec
from jobs.wire import FORMAT


@dataclass(frozen=True)
class Run:
    """What others need to know of a run; ``rows`` in all, where the producer knew from the start.

    ``created`` is in seconds since 1970, ``ttl`` in seconds since the run was last worked on.
    """

    id: str
    spec: ScoreSpec
    queue: str
    ttl: int
    max_retries: int
    created: float
    rows: int | None = None


def read_run(run_id: str, raw: Mapping[bytes, bytes]) -> Run:
    """A run from the fields of its hash; raises `WireError` as `RunStore.load` does."""
    found = raw.get(b"format", b"none").decode()
    if found != str(FORMAT):
        raise WireError(
            f"run {run_id} has format {found}, this release reads {FORMAT}: "
            "run the same rankmill release on producers and workers"
        )
    try:
        spec = ScoreSpec.model_validate_json(raw[b"spec"])
        return Run(
            run_id,
            spec,
            raw[b"queue"].decode(),
            int(raw[b"ttl"]),
            int(raw[b"max_retries"]),
            float(raw[b"created"]),
            int(raw[b"rows"]) if raw.get(b"rows") else None,
        )
    except (KeyError, ValueError) as error:
        raise WireError(f"run {run_id} is damaged: {' '.join(str(error).split())}") from None
