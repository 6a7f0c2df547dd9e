"""Producers cut files and requests into chunks, enqueue them and collect the scores."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producer.client import Client, Ranked, ScoringRun
    from producer.cross_encoder import CrossEncoder

__all__ = ["Client", "CrossEncoder", "Ranked", "ScoringRun"]


def __getattr__(name: str) -> Any:
    """Import the client on first use: the code that starts embedded workers does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from producer import client, cross_encoder

    return getattr(cross_encoder if name == "CrossEncoder" else client, name)
