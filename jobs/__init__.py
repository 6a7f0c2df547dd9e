"""The contract between producers and workers. Light: no torch, no engine."""

from jobs.errors import RankmillError
from jobs.spec import ScoreSpec
from jobs.tasks import score_chunk

__all__ = ["RankmillError", "ScoreSpec", "score_chunk"]
