"""Counts the refused and failed requests of all gateways in Redis, and shows them in the views of the
cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import redis

from rankmill.cluster.look import Look
from rankmill.cluster.watch import ClusterFault, Seen, Watch
from rankmill.extensions.gateway import redis_keys as keys
from rankmill.jobs.system import system

Outcome = Literal["requests", "overloaded", "failed"]
"""What gateways count:

- ``requests``: all requests for scores.
- ``overloaded``: requests that were refused for overload.
- ``failed``: requests that failed by no fault of the caller.
"""

_SPAN_SECONDS = 30
"""Gateways count in spans of this number of seconds; the counts of the last two spans are shown."""

_SHARE = 0.01
"""The cluster has a fault if more than this share of the requests failed. The cluster also has a fault if
more than this share was refused for overload.
"""

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
    """The numbers of requests that all gateways together had in the last 30 to 60 s, by outcome."""

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
    """Adds the gateways' refused and failed requests to the views of the cluster."""

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
