"""Scores shapes of rerankers on a device in each way: padded, packed, and packed by CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from benchmarks.comparison.rerankers import CHAIN, DECODER, make_model, make_pairs
from benchmarks.engine.ceiling import best_seconds, torch_products
from benchmarks.engine.stages import forward
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.base import Logits
from rankmill.workers.backends.torch.backend import DTYPES, TorchBackend
from rankmill.workers.backends.torch.ways import has_kernel
from rankmill.workers.batches.planner import plan_batches
from rankmill.workers.batches.tokens import put_together
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.engine.work import Work, prepare
from rankmill.workers.host.device import gpu_precision
from rankmill.workers.models.loading import load_model

SHAPES = {
    "MiniLM-L6": ("MiniLM-L6", None),
    "bge-reranker-base": ("XLM-R base", None),
    "bge-reranker-v2-m3": ("XLM-R large", None),
    "Ettin-150m": (CHAIN, None),
    "Qwen3-0.6B": (DECODER, 28),
    "DeBERTa-v3-base": ("DeBERTa-v3 base", None),
}
"""Names of models to shapes of `benchmarks.comparison.rerankers`, and their layers; weights are random."""

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}

PEER = "sentence-transformers"
GRAPHS_AFTER = 10
"""How many times the pairs are scored until the graphs of their batches are recorded."""

Pairs = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Speed:
    """Pairs a second of one shape in one way, of only the forwards and with tokenizing; ``None`` if not
    measured. ``host`` is the CPU time of this process for a pair, in µs, of only the forwards. ``tflops``
    counts the products of all linear layers, also those that the last layer leaves out.
    """

    forwards: float | None
    whole: float | None
    host: float | None = None
    tflops: float | None = None


def made(name: str, folder: Path, *, small: bool) -> Path:
    """A random model of a shape, or a small one of its family, in a folder that may have it."""
    if folder.exists():
        return folder
    shape, layers = SHAPES[name]
    return make_model(shape, folder, 2 if small else layers, SMALL if small else None)


def pairs_for(name: str, folder: Path, count: int) -> Pairs:
    """Pairs whose lengths are as those of MS MARCO."""
    table = pq.read_table(make_pairs(folder / f"{count}.parquet", count, SHAPES[name][0]))
    return table["query"].to_pylist(), table["passage"].to_pylist()


def device_precision(device: str) -> str:
    """The precision that ``auto`` means on a GPU; fp32 on a CPU."""
    return "fp32" if device == "cpu" else gpu_precision(device, ("bf16", "fp16", "fp32"))


def loaded(model: Path, device: str, precision: str, cache: Path) -> Engine:
    """An engine with PyTorch, whose scores are logits; on a GPU with a fast tokenizer, if one is there."""
    spec = ScoreSpec.model_validate(
        {"model": str(model), "precision": precision, "activation": "identity", "max_length": 512}
    )
    budget = first_budget("auto", device)
    ready = load_model(spec, device, "torch", str(cache))
    if device != "cpu" and ready.texts:
        ready.texts.settle()
    return Engine(ready, budget)


def ways(engine: Engine) -> Iterator[str]:
    """Yield the name of each way while the engine is set to it; afterwards the engine is as it was."""
    backend = engine.model.backend
    assert isinstance(backend, TorchBackend)
    packs, graphs = backend.packs, backend.graphs
    may = backend.device == "cpu" or has_kernel(backend.device, DTYPES[backend.precision])
    there = ["packed", *(["graphs"] if graphs else [])] if may and backend.network.prepare_packing() else []
    try:
        for way in ("padded", *there):
            backend.packs, backend.graphs = way != "padded", graphs if way == "graphs" else None
            yield way
    finally:
        backend.packs, backend.graphs = packs, graphs


def alone(engine: Engine, pairs: Pairs) -> Logits:
    """The logit of each pair in a batch of its own."""
    return Engine(engine.model, 1).score(*pairs).scores


def differences(engine: Engine, pairs: Pairs, exact: Logits) -> dict[str, tuple[float, float]]:
    """For each way, the largest difference from `exact`, and the correlation of ranks."""
    found = {}
    for way in ways(engine):
        try:
            for _ in range(GRAPHS_AFTER if way == "graphs" else 1):
                scores = Engine(engine.model, engine.size.token_budget).score(*pairs).scores
        except (RuntimeError, ValueError) as error:
            print(f"  {way} cannot run: {error}", flush=True)
            continue
        found[way] = float(np.abs(scores - exact).max()), _spearman(scores, exact)
    return found


def _spearman(found: Logits, exact: Logits) -> float:
    first, second = (np.argsort(np.argsort(each)).astype(np.float64) for each in (found, exact))
    return float(np.corrcoef(first, second)[0, 1])


def peer(model: Path, device: str) -> Callable[[Pairs], Logits]:
    """`CrossEncoder.predict` in 16 bits, with the attention that it is fastest with; fp32 on a CPU."""
    from sentence_transformers import CrossEncoder
    from transformers.utils import is_flash_attn_2_available

    dtype = DTYPES[device_precision(device)]
    attention = {"attn_implementation": "flash_attention_2"} if is_flash_attn_2_available() else {}
    encoder: Any = CrossEncoder(
        str(model), device=device, max_length=512, model_kwargs={"dtype": dtype, **attention},
        activation_fn=nn.Identity(),
    )  # fmt: skip

    def score(pairs: Pairs, batch: int = 32 if device == "cpu" else 256) -> Logits:
        whole = list(zip(*pairs, strict=True))
        scores: Logits = encoder.predict(whole, batch_size=batch, show_progress_bar=False)
        return np.asarray(scores, dtype=np.float32)

    return score


def speeds(
    engine: Engine, model: Path, pairs: Pairs, rounds: int, said: Callable[[str], None]
) -> dict[str, Speed]:
    """Measure each way and the peer in turn; returns medians of the rounds."""
    seconds: dict[tuple[str, str], list[float]] = {}
    host: dict[str, list[float]] = {}
    work = prepare(engine.model, *pairs)
    other = _peer_or_none(model, engine.model.backend.device, pairs, said)
    for round_ in range(rounds + 1):  # the first warms up, and records graphs
        for way in ways(engine):
            for _ in range(1 if round_ or way != "graphs" else GRAPHS_AFTER):
                taken = timed_forwards(engine, work)
            whole = _timed(lambda: engine.score(*pairs))
            if round_:
                seconds.setdefault((way, "forwards"), []).append(taken[0])
                seconds.setdefault((way, "whole"), []).append(whole)
                host.setdefault(way, []).append(taken[1])
        if other:
            whole = _timed(lambda: other(pairs))
            if round_:
                seconds.setdefault((PEER, "whole"), []).append(whole)
    count, operations = len(pairs[0]), _operations(engine, work)
    found = {}
    for way in dict.fromkeys(way for way, _ in seconds):
        rate = {kind: statistics.median(times) for (each, kind), times in seconds.items() if each == way}
        forwards = rate.get("forwards")
        found[way] = Speed(
            forwards=count / forwards if forwards else None,
            whole=count / rate["whole"],
            host=1e6 * statistics.median(host[way]) / count if way in host else None,
            tflops=operations / forwards / 1e12 if forwards else None,
        )
    return found


def _peer_or_none(
    model: Path, device: str, pairs: Pairs, said: Callable[[str], None]
) -> Callable[[Pairs], Logits] | None:
    try:
        other = peer(model, device)
        other((pairs[0][:8], pairs[1][:8]))
    except Exception as error:  # another library may raise anything, but the figures of ours are still good
        said(f"{PEER} cannot run: {type(error).__name__}: {str(error)[:200]}")
        return None
    return other


def timed_forwards(engine: Engine, work: Work) -> tuple[float, float]:
    """Seconds of all forwards, from tokens to logits, and of the host's CPU."""
    backend = engine.model.backend
    started, cpu = time.perf_counter(), time.process_time()
    cut = plan_batches(work.tokens.lengths, engine.size.token_budget, packed=backend.packs)
    forward(backend, (put_together([(work.tokens, rows)], engine.model.tokenizer.pad_id) for rows in cut))
    return time.perf_counter() - started, time.process_time() - cpu


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _operations(engine: Engine, work: Work) -> float:
    """Floating-point operations of the linear layers for all tokens."""
    backend = engine.model.backend
    assert isinstance(backend, TorchBackend)
    layers = (each for each in backend.network.modules() if isinstance(each, nn.Linear))
    return 2.0 * int(work.tokens.lengths.sum()) * sum(each.in_features * each.out_features for each in layers)


def matrix_tflops(device: str) -> float:
    """The best rate of large matrix products that this device has, in its precision."""
    precision = device_precision(device)
    sizes = [(512, 512, 512)] if device == "cpu" else [(4096, 4096, 16_384), (8192, 8192, 8192)]
    runs = [(n * m * rows, torch_products((n, m), precision, device, rows)[0]) for n, m, rows in sizes]
    rates = [2.0 * products / best_seconds(run) for products, run in runs]
    return max(rates) / 1e12


def gpu_name(device: str) -> str:
    """The device's name."""
    return torch.cuda.get_device_name() if device == "cuda" else device
