"""Measures what a language model gains if passages of one query share the prefix of their prompts.

The model has the widths of Qwen3-Reranker-0.6B, fewer layers and random weights, and scores 100 passages of a
query with and without sharing, in turn; the figures are medians of the rounds.

    python -m benchmarks.engine.prefixes
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.batch_size import first_budget
from rankmill.workers.engine.engine import Engine
from rankmill.workers.host.device import use_threads
from rankmill.workers.models.loading import Model, load_model

_TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}answer"


def make_model(
    folder: Path, layers: int, template: str | None = None, sizes: Mapping[str, int] | None = None
) -> Path:
    """A random Qwen3 with the widths of the 0.6B or with `sizes`, whose tokens are words; it may have a chat
    template.
    """
    words = ["[UNK]", "yes", "no", "system", "query", "document", "answer", *(f"w{n}" for n in range(2000))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")
    fast.model_max_length = 2048
    fast.chat_template = template
    fast.save_pretrained(folder)
    widths = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128,
              "num_key_value_heads": 8}  # fmt: skip
    config = Qwen3Config(
        vocab_size=len(words), num_hidden_layers=layers, max_position_embeddings=2048,
        **(widths if sizes is None else {**sizes, "head_dim": 16, "num_key_value_heads": 2}),
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def seconds(model: Model, budget: int, queries: list[str], passages: list[str]) -> tuple[float, np.ndarray]:
    """Seconds to score the pairs, tokenizing included, and their scores."""
    engine = Engine(model, budget)
    started = time.perf_counter()
    scored = engine.score(queries, passages)
    return time.perf_counter() - started, scored.scores


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--passages", type=int, default=100)
    parser.add_argument("--prefix", type=int, default=300, help="Tokens before the passage.")
    parser.add_argument("--words", type=int, default=100, help="Mean tokens of a passage.")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    use_threads("auto")
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(f"w{draw.randrange(2000)}" for _ in range(words))

    with tempfile.TemporaryDirectory() as folder:
        model_folder = make_model(Path(folder), args.layers)
        instruction = text(args.prefix - 20)
        spec = ScoreSpec(
            model=str(model_folder), precision="fp32", instruction=instruction, prompt_template=_TEMPLATE
        )
        model = load_model(spec, "cpu", "torch", f"{folder}/cache")
        queries = [text(16)] * args.passages
        passages = [text(draw.randint(args.words // 2, args.words * 3 // 2)) for _ in queries]
        budget = first_budget("auto", "cpu")
        times: dict[bool, list[float]] = {True: [], False: []}
        scores: dict[bool, np.ndarray] = {}
        for _ in range(args.rounds):
            for sharing, taken in times.items():
                model.backend.shares_prefixes = sharing
                spent, scores[sharing] = seconds(model, budget, queries, passages)
                taken.append(spent)
        shared, alone = (statistics.median(times[sharing]) for sharing in (True, False))
        worst = float(np.abs(scores[True] - scores[False]).max())
        print(f"{args.passages} passages, {args.prefix} tokens before each, {args.words} in it on average")
        print(f"without sharing {alone:.2f} s, with {shared:.2f} s: {alone / shared:.2f} times as fast")
        print(f"largest difference of a score: {worst:.1e}")


if __name__ == "__main__":
    main()
