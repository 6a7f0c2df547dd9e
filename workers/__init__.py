"""Workers: they take chunks of pairs off the queue and score them."""

from workers.queue.connection import Connection
from workers.worker import ScoringWorker

__all__ = ["Connection", "ScoringWorker"]
