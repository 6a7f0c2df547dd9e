"""Gets a ranking and a stream of scores over HTTP, without a client library.

pip install -c constraints.txt '.[gateway,worker]'
rankmill serve --embedded --model demo
python examples/http_client.py http://127.0.0.1:9809
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import IO

PASSAGES = ["Cheese is made from milk.", "About 384,400 km from the earth.", "The sun is a star."]


def post(url: str, **body: object) -> IO[bytes]:
    """The answer to a request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})  # noqa: S310
    answer: IO[bytes] = urllib.request.urlopen(request, timeout=60)  # noqa: S310
    return answer


def main(url: str) -> None:
    """Rank some passages, and score many."""
    with post(f"{url}/v2/rerank", query="how far is the moon", documents=PASSAGES) as answer:
        for result in json.load(answer)["results"]:
            print(f"{result['relevance_score']:.3f}  {PASSAGES[result['index']]}")
    many = [f"{passage} {number}" for number in range(100) for passage in PASSAGES]
    with post(f"{url}/score", queries="how far is the moon", documents=many, stream=True) as events:
        for line in events:
            if line.startswith(b"data: "):
                found = json.loads(line[6:])
                print("all scores are there" if "data" in found else f"{len(found['scores'])} scores")


if __name__ == "__main__":
    main(sys.argv[1])
