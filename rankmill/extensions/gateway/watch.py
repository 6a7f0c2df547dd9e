"""Counts of refused and failed requests; gateways write them to Redis for the views of the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import redis

from rankmill.cluster.look import Look
from rankmill.cluster.watch import ClusterFault, Seen, Watch
from rankmill.extensions.gateway import redis_keys as keys
from rankmill.jobs.system import system

Outcome = Literal["requests", "overloaded", "failed"]
"""Gateways count all requests for scores, requests that were refused for overload, and requests that failed.
"""

_SPAN_SECONDS = 30
"""Length in seconds of the spans of time in which gateways count; the last two spans are read."""

_SHARE = 0.01
"""Share of the requests above which refusals, or failures, are a fault."""

_FAULTS: tuple[tuple[Outcome, str, str, str], ...] = (
    (
        "failed", "gateway_errors", "failed",
        "the gateways' logs say why, with the id that is in each answer",
    ),
    (
        "overloaded", "gateway_overload", "were refused, because it is overloaded",
        "add workers, or raise gateway_requests and gateway_backlog_seconds",
    ),
)  # fmt: skip


def tell(client: redis.Redis, counts: Mapping[Outcome, int]) -> None:
    """Add a gateway's new counts to the counts of all gateways."""
    key = keys.gateway_outcomes(int(system.now() // _SPAN_SECONDS))
    with client.pipeline() as pipe:
        for outcome, number in counts.items():
            pipe.hincrby(key, outcome, number)
        pipe.expire(key, 3 * _SPAN_SECONDS)
        pipe.execute()


class SeenGateways(Seen):
    """The outcomes of the requests of the last 30 to 60 s, at all gateways together."""

    requests: int = 0
    overloaded: int = 0
    failed: int = 0

    def faults(self) -> Iterator[ClusterFault]:
        for outcome, kind, words, remedy in _FAULTS:
            number = getattr(self, outcome)
            if number > _SHARE * self.requests:
                text = f"{number:,} of {self.requests:,} requests to the gateway {words}, in the last minute"
                yield ClusterFault(kind=kind, text=text, remedy=remedy)


class GatewayWatch(Watch):
    """Shows how many requests gateways refuse, and how many fail."""

    kinds: ClassVar = {"gateway_errors": "stuck_run", "gateway_overload": "gateway_errors"}
    nothing: ClassVar = SeenGateways()

    def read(self, look: Look) -> SeenGateways:
        now = int(look.now // _SPAN_SECONDS)
        fields = list(SeenGateways.model_fields)
        spans = [keys.gateway_outcomes(span) for span in (now - 1, now)]
        replies = look.replies(spans, lambda key: [("hmget", key, [None] * len(fields), *fields)])
        counts = [
            [look.number(raw, key) for raw in raws] for key, (raws,) in zip(spans, replies, strict=True)
        ]
        return SeenGateways(**{field: sum(values) for field, *values in zip(fields, *counts, strict=True)})


WATCH = GatewayWatch()
