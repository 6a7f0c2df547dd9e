"""Label preference data with the scores of both answers, and with their difference.

python examples/recipes/label_preferences.py preferences.jsonl labelled.jsonl MODEL [redis://…]

MODEL is a reward model, such as Skywork/Skywork-Reward-V2-Qwen3-0.6B. Each line has `prompt`, `chosen` and
`rejected`. The lines come out with `chosen_score`, `rejected_score` and `margin`; with a margin under 0 the
model prefers the answer that was rejected. Look at these lines first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rankmill import Client


def main(source: str, output: str, model: str, url: str = "") -> None:
    """Score both answers of every line in one run, and write the lines with their scores."""
    rows = [json.loads(line) for line in Path(source).read_text("utf-8").splitlines()]
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in rows
        for side in ("chosen", "rejected")
    ]
    with Client(url, model=model) if url else Client.embedded(model=model) as client:
        scores = client.score(messages=chats, timeout=600)
    if scores.errors:
        row, reason = next(iter(scores.errors.items()))
        raise SystemExit(f"line {row // 2 + 1} has no score: {reason}")
    with Path(output).open("w", encoding="utf-8") as file:
        for row, (chosen, rejected) in zip(rows, scores.reshape(-1, 2).tolist(), strict=True):
            labels = {"chosen_score": chosen, "rejected_score": rejected, "margin": chosen - rejected}
            file.write(json.dumps(row | labels, ensure_ascii=False) + "\n")
    agreed = int((scores[::2] > scores[1::2]).sum())
    print(f"the model agrees with {agreed} of {len(rows)} preferences; all are in {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
