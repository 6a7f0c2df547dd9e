"""Producers cut files and requests into chunks, enqueue them and collect the scores."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer.aio.client import AsyncClient
    from producer.aio.runs import AsyncDetachedRun, AsyncScoringRun, AsyncSubmittedFile
    from producer.client import Client
    from producer.cross_encoder import CrossEncoder
    from producer.runs.detached import DetachedRun
    from producer.runs.scores import Ranked, RunStats, Scores
    from producer.runs.scoring_run import ScoringRun
    from producer.submitted.file import SubmittedFile

_HOMES = {
    "AsyncClient": "producer.aio.client",
    "AsyncDetachedRun": "producer.aio.runs",
    "AsyncScoringRun": "producer.aio.runs",
    "AsyncSubmittedFile": "producer.aio.runs",
    "Client": "producer.client",
    "CrossEncoder": "producer.cross_encoder",
    "DetachedRun": "producer.runs.detached",
    "Ranked": "producer.runs.scores",
    "RunStats": "producer.runs.scores",
    "Scores": "producer.runs.scores",
    "ScoringRun": "producer.runs.scoring_run",
    "SubmittedFile": "producer.submitted.file",
}

__all__ = [
    "AsyncClient",
    "AsyncDetachedRun",
    "AsyncScoringRun",
    "AsyncSubmittedFile",
    "Client",
    "CrossEncoder",
    "DetachedRun",
    "Ranked",
    "RunStats",
    "Scores",
    "ScoringRun",
    "SubmittedFile",
]


def __getattr__(name: str) -> Any:
    """Import the client on first use: the code that starts embedded workers does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
