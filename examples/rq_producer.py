"""Gets scores in a service that has only ``rq``, without rankmill, Arrow and torch.

    pip install rq
    python examples/rq_producer.py redis://localhost:6379/0

Workers of rankmill listen on the queue (``rq worker rankmill --worker-class rankmill.ScoringWorker …``).
"""

from __future__ import annotations

import sys
from typing import Any

from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

QUERY = "how far is the moon"
SECONDS = 60
PASSAGES = ["The moon is 384,400 km away from Earth.", "Cheese is made of milk.", None]


def main(url: str, queue_name: str = "rankmill", model: str = "demo") -> None:
    """Rank passages, and print them with their scores."""
    connection = Redis.from_url(url, socket_timeout=2 * SECONDS)  # longer than the wait for a result
    queue = Queue(queue_name, connection=connection, serializer=JSONSerializer)
    pairs = [[QUERY, passage] for passage in PASSAGES]
    job = queue.enqueue("rankmill.score_pairs", pairs, model=model, ttl=SECONDS, result_ttl=SECONDS)
    found: Any = job.latest_result(timeout=SECONDS)
    if found is None:
        job.delete()  # so that no worker scores it in vain
        raise SystemExit(f"no scores within {SECONDS} s")
    if found.type is not found.Type.SUCCESSFUL:
        raise SystemExit(f"not scored: {found.exc_string}")
    scored = found.return_value
    best_first = sorted((row for row in range(len(PASSAGES)) if scored["scores"][row] is not None),
                        key=lambda row: -scored["scores"][row])  # fmt: skip
    for row in best_first:
        print(f"{scored['scores'][row]:8.2f}  {PASSAGES[row]}")
    for each in scored["errors"]:
        print(f"   row {each['row']} has no score: {each['error']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
