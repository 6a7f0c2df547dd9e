"""Submits a file of requests as a batch by OpenAI's client, and writes a file of answers.

Commands, of which the last two are for other terminals; serve prints the address that the runner needs::

    pip install -c constraints.txt '.[gateway,worker]' openai
    mkdir batches
    RANKMILL_GATEWAY_FILES=batches rankmill serve --embedded --model demo
    rankmill runner --redis …
    python examples/batch.py http://127.0.0.1:9809 requests.jsonl answers.jsonl
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

PASSAGES = ["Cheese is made from milk.", "About 384,400 km from the earth.", "The sun is a star."]
QUESTIONS = ["how far is the moon", "what is cheese made from", "what is the sun"]


def write_requests(path: Path) -> None:
    """Write a request for each question, which asks which passages answer the question best."""
    with path.open("w", encoding="utf-8") as file:
        for number, question in enumerate(QUESTIONS):
            body = {"query": question, "documents": PASSAGES}
            line = {"custom_id": f"q-{number}", "method": "POST", "url": "/v1/rerank", "body": body}
            file.write(json.dumps(line) + "\n")


def main(url: str, requests: Path, answers: Path, key: str = "none") -> None:
    """Submit the requests, which are made if they are not there, wait, and show the best passages."""
    if not requests.exists():
        write_requests(requests)
    client = OpenAI(base_url=f"{url}/v1", api_key=key)
    with requests.open("rb") as file:
        kept = client.files.create(file=file, purpose="batch")
    endpoint: Any = "/v1/rerank"  # the types of this client know only OpenAI's paths
    batch = client.batches.create(input_file_id=kept.id, endpoint=endpoint, completion_window="24h")
    while batch.status not in {"completed", "failed", "cancelled", "expired"}:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    if batch.status != "completed":
        sys.exit(f"the batch has {batch.status}: {batch.errors}")
    for name, place in ((batch.output_file_id, answers), (batch.error_file_id, Path(f"{answers}.errors"))):
        if name:
            place.write_bytes(client.files.content(name).content)
    asked = {line["custom_id"]: line["body"] for line in map(json.loads, requests.open(encoding="utf-8"))}
    for line in map(json.loads, answers.open(encoding="utf-8")):
        best = line["response"]["body"]["results"][0]
        passage = asked[line["custom_id"]]["documents"][best["index"]]
        print(f"{line['custom_id']}  {best['relevance_score']:.3f}  {passage}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
