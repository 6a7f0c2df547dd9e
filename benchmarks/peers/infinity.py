# /// script
# dependencies = ["torch==2.13.0", "infinity-emb[torch,optimum]==0.0.78", "pyarrow==18.1.0"]
# ///
"""Runs infinity's engine in process, without HTTP, on all queries at once, so that batches can be full."""

from __future__ import annotations

import argparse
import asyncio
import os
import traceback
from itertools import groupby

import torch
from contract import Loaded, arguments, measure
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

BATCH = 32


def load(args: argparse.Namespace) -> Loaded:
    """Start the torch engine."""
    settings = EngineArgs(
        model_name_or_path=str(args.model),
        engine="torch",
        dtype=args.variant,
        batch_size=BATCH,
        bettertransformer=False,  # optimum 2 lacks it, and transformers uses sdpa by itself
        model_warmup=False,  # the contract warms up
    )
    engine = AsyncEmbeddingEngine.from_args(settings)
    runner = asyncio.Runner()
    runner.run(engine.astart())

    def score(queries: list[str], passages: list[str]) -> list[float]:
        return runner.run(rerank(engine, queries, passages))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # auto: float16 on a GPU
    precision = "bf16" if args.variant == "bfloat16" else "fp16" if device == "cuda" else "fp32"
    return Loaded(
        score,
        precision,
        f"{device}, dtype {args.variant}, batch {BATCH} (its default), in process, all queries at once",
    )


async def rerank(engine: AsyncEmbeddingEngine, queries: list[str], passages: list[str]) -> list[float]:
    """One request for each run of the same query, all under way together."""
    rows = range(len(queries))
    runs = [(query, list(places)) for query, places in groupby(rows, key=queries.__getitem__)]
    requests = [
        engine.rerank(query=query, docs=[passages[row] for row in places], raw_scores=True)
        for query, places in runs
    ]
    scores: list[float] = []
    for ranking, _tokens in await asyncio.gather(*requests):
        scores += [each.relevance_score for each in sorted(ranking, key=lambda each: each.index)]
    return scores


if __name__ == "__main__":
    try:
        measure(arguments(choices=["auto", "bfloat16"]), load, ["infinity-emb", "transformers", "torch"])
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the engine's threads would keep the process alive
