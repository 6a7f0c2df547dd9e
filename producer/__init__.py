"""Producers: they cut files and requests into chunks, enqueue them and collect the scores."""

from producer.client import Client, Ranked, ScoringRun

__all__ = ["Client", "Ranked", "ScoringRun"]
