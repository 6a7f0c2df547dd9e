"""Measures the time of each stage of a chunk, and how far the forward is from the machine's floor.

    python -m benchmarks.engine.stages --model MODEL --pairs PAIRS.parquet

Every stage is run by itself, one after the other, on the same pairs; in a worker, the other stages run beside
the forward. The floor is the time that the model's matrix products would take at the rate that large products
reach on this machine, in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.contract.wire import decode_rows, decode_scores, encode_rows, encode_scores
from rankmill.workers.backends.base import Backend, Logits, Pending
from rankmill.workers.backends.torch.backend import DTYPES
from rankmill.workers.batches.planner import plan_batches
from rankmill.workers.batches.tokens import Batch, put_together
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.work import Work, prepare
from rankmill.workers.host.device import resolve_device, use_threads
from rankmill.workers.models.loading import load_model


def main() -> None:
    """Print milliseconds and share of the forward for each stage, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=Path, required=True, help="parquet: query, passage")
    parser.add_argument("--sample", type=int, default=1024, help="pairs: one chunk")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    use_threads("auto")
    table = pq.read_table(args.pairs, columns=["query", "passage"]).slice(0, args.sample)
    device = resolve_device("auto")
    engine = Engine(load_model(ScoreSpec(model=args.model), device), first_budget("auto", device))
    rounds = [stages(engine, table) for _ in range(args.repeats + 1)][1:]
    result: dict[str, Any] = {
        stage: round(1000 * statistics.median(r[stage] for r in rounds), 2) for stage in rounds[0]
    }
    backend = engine.model.backend
    work = prepare(engine.model, *(table[name].to_pylist() for name in ("query", "passage")))
    floor = floor_seconds(args.model, work.tokens.lengths, backend.device, backend.precision)
    print(
        json.dumps(
            {
                "pairs": len(table),
                "backend": f"{backend.name}, {backend.device}, {backend.precision}",
                "milliseconds": result,
                "share_of_forward": {k: round(v / result["forward"], 4) for k, v in result.items()},
                "floor_ms": round(1000 * floor, 2),
                "floor_over_forward": round(1000 * floor / result["forward"], 3),
            },
            indent=2,
        )
    )


def stages(engine: Engine, table: pa.Table) -> dict[str, float]:
    """Seconds of each stage for one chunk."""
    taken: dict[str, float] = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        value = run()
        taken[stage] = time.perf_counter() - started
        return value

    columns = [table[name].combine_chunks() for name in ("query", "passage")]
    payload = timed("encode pairs", lambda: encode_rows(columns, "pairs"))
    queries, passages = timed("decode pairs", lambda: decode_rows(payload, "pairs"))
    work: Work = timed("tokenize", lambda: prepare(engine.model, queries, passages))
    batches = timed("plan", lambda: plan_batches(work.tokens.lengths, engine.size.token_budget))
    pad_id = engine.model.tokenizer.pad_id
    padded = timed("put together", lambda: [put_together([(work.tokens, rows)], pad_id) for rows in batches])
    logits = timed("forward", lambda: forward(engine.model.backend, padded))
    scores = timed("activation", lambda: [engine.model.activation(some) for some in logits])
    found = pa.array(np.concatenate(scores))
    entry = timed("encode scores", lambda: encode_scores(found, pa.nulls(len(found), pa.string())))
    timed("decode scores", lambda: decode_scores(entry))
    return taken


def forward(backend: Backend, batches: Iterable[Batch]) -> list[Logits]:
    """Run all batches, with as many in progress at a time as the backend wants."""
    pending: list[Pending] = []
    logits = []
    for batch in batches:
        pending.append(backend.submit(batch))
        if len(pending) >= backend.depth:
            logits.append(pending.pop(0).result())
    return logits + [some.result() for some in pending]


def floor_seconds(model: str, lengths: Any, device: str, precision: str) -> float:
    """Operations of the pairs' matrix products over the rate of a large product."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    tokens = np.asarray(lengths, dtype=np.float64)
    for_each_token = 2 * (4 * width * width + 2 * width * inner)
    attention = 2 * 2 * width * tokens**2
    last = 2 * 2 * width * width * tokens + 2 * (
        2 * width * width + 2 * width * inner
    )  # keys, values; one token
    operations = ((layers - 1) * (for_each_token * tokens + attention) + last).sum()
    return float(operations / product_rate(device, precision, width, inner))


def product_rate(device: str, precision: str, width: int, inner: int) -> float:
    """Operations a second of a product of the model's own shape, with many rows."""
    left = torch.randn(4096, width, device=device, dtype=DTYPES[precision])
    right = torch.randn(width, inner, device=device, dtype=DTYPES[precision])
    rates = []
    for _ in range(30):
        started = time.perf_counter()
        for _ in range(5):
            left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(5 * 2 * 4096 * width * inner / (time.perf_counter() - started))
    return statistics.median(rates[5:])


if __name__ == "__main__":
    main()
