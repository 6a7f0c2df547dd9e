"""Workers: they take chunks of pairs off the queue and score them."""

from workers.worker import ScoringWorker

__all__ = ["ScoringWorker"]
