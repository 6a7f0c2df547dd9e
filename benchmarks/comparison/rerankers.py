"""Compares rankmill with sentence-transformers for the shapes of rerankers, with random weights, in turn.

    python -m benchmarks.comparison.rerankers --only MiniLM-L6 ModernBERT-base --rounds 2

The contenders are those of `benchmarks.compare` that are exact: sentence-transformers with PyTorch, ONNX
Runtime and OpenVINO, each with its defaults, and `Engine.score`. For each shape, the command prints how many
times as fast each is as sentence-transformers in fp32, by the fastest of all rounds, and how far its scores
are from those. With ``--whole-last-layer`` it prints instead what computing the last layer only for the first
token gains, and the share of padding; in process, in fp32 with PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.comparison.contenders import CONTENDERS, ENGINE, FP32, Run, run
from benchmarks.comparison.environments import ROOT
from benchmarks.engine import prefixes
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.backends.first_token import read_first_token_only
from rankmill.workers.backends.torch import networks
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import use_threads
from rankmill.workers.models.loading import load_model
from rankmill.workers.models.sources import DEMO_MODEL

_BASE = {
    "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072,
    "max_position_embeddings": 514,
}  # fmt: skip
_LARGE = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096,
    "max_position_embeddings": 8194,
}  # fmt: skip
_DEBERTA = {
    "max_position_embeddings": 512, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
_SMALL = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6, "intermediate_size": 1536}
_MODERN = {
    "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 22, "intermediate_size": 1152,
    "max_position_embeddings": 8192, "classifier_pooling": "mean",
}  # fmt: skip

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniLM-L6": ("bert", _SMALL),
    "XLM-R base": ("xlm-roberta", _BASE),
    "XLM-R large": ("xlm-roberta", _LARGE),
    "ModernBERT-base": ("modernbert", _MODERN),
    "ModernBERT-base, CLS": ("modernbert", {**_MODERN, "classifier_pooling": "cls"}),
    "DeBERTa-v3 base": ("deberta-v2", {**_BASE, **_DEBERTA}),
}
CHAIN = "Ettin 150M"
"""Name of the shape whose score is made by a chain of sentence-transformers' modules; ModernBERT's body."""

DECODER = "Qwen3-0.6B, 2 layers"
"""Name of the shape that reads a prompt; it stands for all language models."""

_PROMPT = (
    "{% set query = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first %}"
    "{% set document = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first %}"
    "system " + " ".join(f"w{n}" for n in range(54)) + " query {{ query }} document {{ document }} answer"
)
"""A chat template with as many tokens before the query as that of Qwen3-Reranker, about 55."""

PEERS = ("st-bf16", "st-onnx", "st-openvino", "st-openvino-fp32")
"""The exact variants of sentence-transformers beside fp32."""


def make_model(
    shape: str, folder: Path, layers: int | None = None, sizes: Mapping[str, int] | None = None
) -> Path:
    """A random model of a shape, with the demo model's tokenizer; a language model's tokens are words.

    `layers` and `sizes` replace the number of layers and the widths of the shape.
    """
    if shape == DECODER:
        return prefixes.make_model(folder, layers or 2, _PROMPT, sizes)
    kind, options = ENCODERS["ModernBERT-base" if shape == CHAIN else shape]
    options = {**options, "num_hidden_layers": layers or options["num_hidden_layers"], **(sizes or {})}
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL, model_max_length=512)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, initializer_range=0.05, **{"type_vocab_size": 2, **options, **sizes})
    if shape == CHAIN:
        AutoModel.from_config(config).save_pretrained(folder)
        return _with_chain(folder, config.hidden_size)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


def _with_chain(body: Path, width: int) -> Path:
    """A body with the modules of Ettin's rerankers after it, as sentence-transformers saves them.

    Only this shape needs that package in the environment of the command; the peers have their own.
    """
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    chain = [
        Transformer(str(body)),
        Pooling(width, "cls"),
        Dense(width, width, bias=False, activation_function=nn.GELU()),
        LayerNorm(width),
        Dense(width, 1, activation_function=nn.Identity(), module_output_name="scores"),
    ]
    CrossEncoder(modules=chain, device="cpu").save_pretrained(str(body / "chain"))
    return body / "chain"


def make_pairs(target: Path, pairs: int, shape: str) -> Path:
    """Make ten passages for each query, with lengths in words like those of MS MARCO's passages."""
    lines = (ROOT / "examples" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    words = " ".join(json.loads(line)["passage"] for line in lines).split()
    words = [f"w{number}" for number in range(2000)] if shape == DECODER else words
    draw = random.Random(0)

    def text(count: int) -> str:
        start = draw.randrange(len(words) - 400)
        return " ".join(words[start : start + count])

    lengths = [min(max(round(draw.lognormvariate(math.log(52), 0.45)), 8), 300) for _ in range(pairs)]
    queries = [text(6) for _ in range(-(-pairs // 10))]
    rows = {"query": [queries[row // 10] for row in range(pairs)], "passage": [text(n) for n in lengths]}
    pq.write_table(pa.table(rows), target)
    return target


def measure(shape: str, args: argparse.Namespace, folder: Path) -> None:
    """Run the contenders in turn, and print the lines of a shape."""
    model = make_model(shape, folder / "model")
    pairs = make_pairs(folder / "pairs.parquet", args.pairs, shape)
    chosen = [each for each in CONTENDERS if each.name in {FP32.name, ENGINE.name, *args.peers}]
    found: dict[str, list[Run]] = {each.name: [] for each in chosen}
    for round_ in range(args.rounds):
        for each in chosen:
            if not any(before.failure for before in found[each.name]):
                output = folder / f"{each.name}.npy"
                done = run(each, round_, model, pairs, output, here=args.here, times=args.times)
                found[each.name].append(done)
                said = done.failure or f"{args.pairs / done.seconds:.1f} pairs/s"
                print(f"{shape}, round {round_ + 1}: {each.title}: {said}", file=sys.stderr, flush=True)
    first = found[FP32.name][0]
    if first.failure:
        print(f"{shape}: sentence-transformers cannot run: {first.failure}")
        return
    exact, usual = np.load(folder / f"{FP32.name}.npy"), _seconds(found[FP32.name])
    best = min(_seconds(runs) for name, runs in found.items() if name != ENGINE.name and not runs[0].failure)
    for each in chosen:
        runs = found[each.name]
        if runs[0].failure:
            print(f"{shape} | {each.title} | cannot run: {runs[0].failure}")
            continue
        off = float(np.abs(np.load(folder / f"{each.name}.npy") - exact).max())
        speed = args.pairs / _seconds(runs)
        print(
            f"{shape} | {each.title} | {runs[0].settings} | {speed:.1f} pairs/s | "
            f"{usual / _seconds(runs):.2f} | from fp32 at most {off:.1e}"
        )
    if not found[ENGINE.name][0].failure:
        ratio = best / _seconds(found[ENGINE.name])
        print(f"{shape} | rankmill over the best of sentence-transformers: {ratio:.2f}")


def measure_layer(shape: str, args: argparse.Namespace, folder: Path) -> None:
    """Print what computing the last layer only for the first token gains, and the share of padding."""
    table = pq.read_table(make_pairs(folder / "pairs.parquet", args.pairs, shape))
    texts = table["query"].to_pylist(), table["passage"].to_pylist()
    spec = ScoreSpec(model=str(folder / "model"), precision="fp32")
    use_threads("auto")
    engines: dict[str, Engine] = {}
    kept: dict[str, Callable[[Any], bool]] = {
        "whole": lambda model: False,
        "first token": read_first_token_only,
    }
    for name, replaced in kept.items():
        with mock.patch.object(networks, "read_first_token_only", replaced):
            loaded = load_model(spec, "cpu", "torch", str(folder / "cache"))
        engines[name] = Engine(loaded, first_budget("auto", "cpu"))
    times: dict[str, list[float]] = {name: [] for name in engines}
    scored = None
    for _ in range(args.rounds + 1):  # the first warms up
        for name, engine in engines.items():
            started = time.perf_counter()
            scored = engine.score(*texts)
            times[name].append(time.perf_counter() - started)
    whole, only = (statistics.median(times[name][1:]) for name in ("whole", "first token"))
    print(f"{shape} | last layer for the first token only: {whole / only:.3f} times as fast")
    assert scored
    print(f"{shape} | padding: {1 - scored.tokens / scored.padded_tokens:.1%} of the computed tokens")


def _seconds(runs: list[Run]) -> float:
    """Seconds of the fastest run, because other load on a machine only makes a run slower."""
    return min(each.seconds for each in runs)


def main() -> None:
    """Measure and print."""
    names = [*ENCODERS, CHAIN, DECODER]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SHAPE")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="NAME")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--times", type=int, default=3, help="how often a contender scores all pairs in a round"
    )
    parser.add_argument("--whole-last-layer", action="store_true", help="measure only what that layer gains")
    parser.add_argument("--here", action="store_true", help="make no environments: run the peers in this one")
    args = parser.parse_args()
    for shape in args.only:
        with tempfile.TemporaryDirectory() as folder:
            if args.whole_last_layer:
                make_model(shape, Path(folder) / "model")
                measure_layer(shape, args, Path(folder))
            else:
                measure(shape, args, Path(folder))


if __name__ == "__main__":
    main()
