"""The contract between producers and workers. Light: no torch, no engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jobs.errors import RankmillError

if TYPE_CHECKING:
    from jobs.files.job import score_file
    from jobs.pairs_job import score_pairs
    from jobs.spec import ScoreSpec
    from jobs.store.recovery import score_chunk

__all__ = ["RankmillError", "ScoreSpec", "score_chunk", "score_file", "score_pairs"]

_HOMES = {
    "ScoreSpec": "jobs.spec",
    "score_chunk": "jobs.store.recovery",
    "score_file": "jobs.files.job",
    "score_pairs": "jobs.pairs_job",
}


def __getattr__(name: str) -> Any:
    """Import the other names on first use: processes that only start workers do not need them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
