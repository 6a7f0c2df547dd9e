"""Score query-passage pairs with cross-encoders, at any scale, through a queue.

This module has the names that services import and that RQ looks up. Each name is imported on its first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing is slow to import

if TYPE_CHECKING:
    from typing import Any

    from rankmill.extensions.runners.store import score_file as score_file
    from rankmill.extensions.runners.submitted import AsyncSubmittedFile as AsyncSubmittedFile
    from rankmill.extensions.runners.submitted import SubmittedFile as SubmittedFile
    from rankmill.jobs.contract.errors import (
        ConfigError,
        ConnectionFailed,
        EmbeddedError,
        InputChanged,
        InputError,
        NotInRegistry,
        NoWorkers,
        OutputBusy,
        OutputError,
        RankmillError,
        RedisFailed,
        RedisUnavailable,
        RegistryAway,
        RegistryConflict,
        RegistryError,
        RunCancelled,
        RunExpired,
        RunFailed,
        RunTimeout,
        StillWaiting,
        StoreError,
        WireError,
        WrongScores,
    )
    from rankmill.jobs.contract.spec import ScoreSpec
    from rankmill.jobs.protocol.job_functions import score_chunk, score_pairs
    from rankmill.producer.client.async_client import AsyncClient, AsyncScoringRun
    from rankmill.producer.client.cross_encoder import CrossEncoder
    from rankmill.producer.client.runs import Classified, Ranked, RunStats, Scores, ScoringRun
    from rankmill.producer.client.sync_client import Client
    from rankmill.workers.queue.connection import Connection
    from rankmill.workers.worker import ScoringWorker

__all__ = [
    "AsyncClient", "AsyncScoringRun", "Classified", "Client", "ConfigError", "Connection", "ConnectionFailed",
    "CrossEncoder", "EmbeddedError", "InputChanged", "InputError", "NoWorkers", "NotInRegistry", "OutputBusy",
    "OutputError", "Ranked", "RankmillError", "RedisFailed", "RedisUnavailable", "RegistryAway",
    "RegistryConflict", "RegistryError", "RunCancelled", "RunExpired", "RunFailed", "RunStats", "RunTimeout",
    "ScoreSpec", "Scores", "ScoringRun", "ScoringWorker", "StillWaiting", "StoreError", "WireError",
    "WrongScores", "score_chunk", "score_pairs",
]  # fmt: skip

_HOMES = {
    **dict.fromkeys(__all__, "jobs.contract.errors"),  # names that no line below has are error classes
    "AsyncClient": "producer.client.async_client",
    "AsyncScoringRun": "producer.client.async_client",
    "Classified": "producer.client.runs",
    "Client": "producer.client.sync_client",
    "Connection": "workers.queue.connection",
    "CrossEncoder": "producer.client.cross_encoder",
    "Ranked": "producer.client.runs",
    "RunStats": "producer.client.runs",
    "ScoreSpec": "jobs.contract.spec",
    "Scores": "producer.client.runs",
    "ScoringRun": "producer.client.runs",
    "ScoringWorker": "workers.worker",
    "score_chunk": "jobs.protocol.job_functions",
    "score_pairs": "jobs.protocol.job_functions",
}

_OF_EXTENSIONS = ("AsyncSubmittedFile", "SubmittedFile", "score_file")
"""Names that extensions add by entry points in the group ``rankmill.names``. ``import *`` leaves them out."""


def __getattr__(name: str) -> Any:
    if name in _OF_EXTENSIONS:
        from rankmill.plugins import load

        try:
            return load("rankmill.names", name)
        except KeyError:
            raise ImportError(
                f"{__name__}.{name} comes with an extension that is not installed here"
            ) from None
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
