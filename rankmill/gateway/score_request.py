"""A request for scores and its result, for every dialect and protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankmill.gateway.refusals import Refusal
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system


@dataclass(frozen=True)
class ScoreRequest:
    """A request for scores.

    ``queries`` is one text for all passages, or one for each. ``model`` is ``None`` for the gateway's own.
    ``spec`` has other fields of `ScoreSpec` for this request.
    """

    queries: str | Sequence[str]
    passages: Sequence[str]
    model: str | None = None
    spec: Mapping[str, str | int] = field(default_factory=dict)

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs to score, in order."""
        if isinstance(self.queries, str):
            return [(self.queries, passage) for passage in self.passages]
        return list(zip(self.queries, self.passages, strict=True))


def within(settings: Settings, spec: Mapping[str, str | int]) -> dict[str, str | int]:
    """The fields of a request's spec, as far as the gateway's settings leave them to it.

    No pair is too long where passages are split into windows.

    Raises
    ------
    Refusal
        It wants longer pairs than the gateway takes.
    """
    most, wanted = settings.max_length, spec.get("max_length")
    if most is not None and isinstance(wanted, int) and wanted > most:
        raise Refusal("invalid", f"{wanted:,} tokens are more than the {most:,} of a pair: ask for fewer")
    return {name: value for name, value in spec.items() if name != "long" or settings.long != "split"}


@dataclass(frozen=True)
class RequestScores:
    """Scores of a request, in input order.

    ``tokens`` are those that were computed, without padding. ``created`` is in seconds since 1970,
    ``seconds`` is the time that the scores took, ``work_seconds`` that of the slowest chunk in its worker,
    of which ``tokenize_seconds`` and ``forward_seconds`` are parts (``None``: its worker does not tell, as it
    is of an older release), ``chunks`` their number. ``contract`` says how they were made: precision,
    backend, device, revision and proven bound, as far as they are known.
    """

    scores: Sequence[float]
    model: str
    tokens: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0
    tokenize_seconds: float | None = None
    forward_seconds: float | None = None
    chunks: int = 1
    contract: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: system.unique_id())  # noqa: PLW0108 -- a simulation replaces it
    created: int = field(default_factory=lambda: int(system.now()))

    def ranked(self, top: int | None = None) -> Iterator[tuple[int, float]]:
        """Places in the input and scores, the `top` best first; equal scores in input order."""
        order = sorted(range(len(self.scores)), key=lambda place: (-self.scores[place], place))
        return ((place, self.scores[place]) for place in order[:top])

    def stages(self) -> dict[str, float]:
        """Where the time went (s): those stages that are known."""
        queue = max(self.seconds - self.work_seconds, 0.0)
        parts = {"tokenize": self.tokenize_seconds, "forward": self.forward_seconds}
        known = {stage: seconds for stage, seconds in parts.items() if seconds is not None}
        return {"queue": queue, "work": self.work_seconds, **known}
