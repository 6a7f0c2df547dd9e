"""Train the demo cross-encoder in ``demo-model/`` by distillation.

A small BERT cross-encoder learns to repeat the logits of a larger one (the teacher).  It starts as
the teacher itself with fewer word pieces and feed-forward units, those that are used most.  The
training text is a parquet file with the columns ``query`` and ``passage``; more queries, and passages
that only share a query's words, are made from the passages.

    python -m examples.train_demo_model --teacher TEACHER_DIR --pairs PAIRS.parquet --out OUT_DIR
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from torch.nn.functional import kl_div, mse_loss
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
)

from examples.pseudo_queries import add_distractors, build_pairs

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Weights = dict[str, torch.Tensor]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--teacher", type=Path, required=True, help="BERT cross-encoder folder")
    parser.add_argument("--pairs", type=Path, required=True, help="parquet: query, passage")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--labels", type=Path, help="keep the teacher's labels in this parquet")
    parser.add_argument("--pseudo-queries", type=int, default=10_000)
    parser.add_argument("--distractors", type=int, default=2, help="made for each query")
    parser.add_argument("--vocab-size", type=int, default=7800)
    parser.add_argument("--intermediate", type=int, default=512, help="feed-forward units kept")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--groups-per-step", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=8, help="passages per query and step")
    parser.add_argument("--max-length", type=int, default=144, help="tokens per pair in training")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--list-weight", type=float, default=2.0)
    parser.add_argument("--pooled-weight", type=float, default=5.0)
    parser.add_argument("--held-out", type=float, default=0.03, help="share of the queries")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def encode(tokenizer: Any, frame: pd.DataFrame, max_length: int) -> Any:
    """Tokenize the pairs of a frame into one padded batch; cut only the passages."""
    texts = frame["query"].tolist(), frame["passage"].tolist()
    options = {"padding": True, "truncation": "only_second", "max_length": max_length}
    return tokenizer(*texts, return_tensors="pt", **options)


@torch.inference_mode()
def add_labels(teacher: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """Add the teacher's logit and its pooled vector (fp16 bytes) to every pair, longest first."""
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    model = AutoModelForSequenceClassification.from_pretrained(teacher).eval().bfloat16()
    order = np.argsort(-(frame["query"].str.len() + frame["passage"].str.len()).to_numpy())
    logits = np.zeros(len(frame), dtype=np.float32)
    pooled = np.zeros((len(frame), model.config.hidden_size), dtype=np.float16)
    started = time.monotonic()
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        batch = encode(tokenizer, frame.iloc[rows], 144)
        vectors = model.bert(**batch).pooler_output
        pooled[rows] = vectors.float().numpy()
        logits[rows] = model.classifier(vectors)[:, 0].float().numpy()
        if start % 6400 == 0:
            print(f"labels: {start}/{len(order)} {time.monotonic() - started:.0f} s", flush=True)
    return frame.assign(logit=logits, pooled=[vector.tobytes() for vector in pooled])


def choose_vocabulary(tokenizer: Any, texts: list[str], size: int) -> list[str]:
    """Pick the special tokens, the single characters and the pieces that are likely to be used.

    A piece's use is its frequency in the texts averaged with a Zipf guess from its place in the
    teacher's vocabulary, which is roughly sorted by frequency, so that ordinary words stay whole.
    """
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    counts = Counter(i for text in ids for i in text)
    total = sum(counts.values())
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    first_word = pieces.index("the")
    zipf = 1 / np.log(len(pieces))
    use: dict[str, float] = {}
    for index, piece in enumerate(pieces):
        core = piece.removeprefix("##")
        if not core.isascii() or piece.startswith("["):
            continue
        prior = zipf / (index - first_word + 10) if index >= first_word else 0.0
        use[piece] = 1.0 if len(core) == 1 else counts[index] / total + prior
    kept = set(sorted(use, key=lambda piece: -use[piece])[: size - len(SPECIAL_TOKENS)])
    return [*SPECIAL_TOKENS, *(piece for piece in pieces if piece in kept)]


def save_tokenizer(vocabulary: list[str], out: Path) -> Any:
    """Write a lower-casing WordPiece tokenizer with this vocabulary, and load it again."""
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    BertTokenizer(vocab=ids, do_lower_case=True, model_max_length=512).save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


@torch.inference_mode()
def unit_importance(model: Any, batch: Any) -> list[torch.Tensor]:
    """Rate each feed-forward unit by its mean activation times the size of its output weights."""
    mask = batch["attention_mask"].bool()
    ratings: list[torch.Tensor] = []
    hooks = [
        layer.intermediate.register_forward_hook(
            lambda module, args, output: ratings.append(output[mask].abs().mean(0))
        )
        for layer in model.bert.encoder.layer
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    layers = model.bert.encoder.layer
    return [r * x.output.dense.weight.norm(dim=0) for r, x in zip(ratings, layers, strict=True)]


def prune(teacher: Path, tokenizer: Any, frame: pd.DataFrame, args: argparse.Namespace) -> Any:
    """The teacher with the given tokenizer's pieces and its most important feed-forward units."""
    big = AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    big_tokenizer = AutoTokenizer.from_pretrained(teacher)
    sample = encode(big_tokenizer, frame.sample(128, random_state=args.seed), args.max_length)
    weights: Weights = big.state_dict()
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words = "bert.embeddings.word_embeddings.weight"
    weights[words] = weights[words][big_tokenizer.convert_tokens_to_ids(pieces)]
    for number, rating in enumerate(unit_importance(big, sample)):
        units = rating.topk(args.intermediate).indices
        layer = f"bert.encoder.layer.{number}."
        for name in ("intermediate.dense.weight", "intermediate.dense.bias"):
            weights[layer + name] = weights[layer + name][units]
        weights[layer + "output.dense.weight"] = weights[layer + "output.dense.weight"][:, units]
    settings = big.config.to_dict() | {
        "vocab_size": len(tokenizer),
        "intermediate_size": args.intermediate,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    student = BertForSequenceClassification(BertConfig(**settings, attn_implementation="eager"))
    student.load_state_dict(weights)
    return student


def make_groups(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Split the pairs by query; queries with a single passage are left out."""
    return [group for _, group in frame.groupby("query", sort=False) if len(group) > 1]


def batches(groups: list[pd.DataFrame], args: argparse.Namespace) -> Iterator[list[pd.DataFrame]]:
    """Yield lists of candidate lists for ever; those of one list have passages of like length."""
    rng = random.Random(args.seed)  # noqa: S311
    size = args.candidates
    while True:
        epoch: list[pd.DataFrame] = []
        for group in groups:
            shuffled = group.sample(frac=1, random_state=rng.randrange(2**31))
            cuts = [shuffled.iloc[i : i + size] for i in range(0, len(shuffled), size)]
            epoch += [cut for cut in cuts if len(cut) > 1]
        rng.shuffle(epoch)
        for start in range(0, len(epoch), 64 * args.groups_per_step):
            block = epoch[start : start + 64 * args.groups_per_step]
            block.sort(key=lambda cut: int(cut["passage"].str.len().max()))
            steps = [block[i : i + args.groups_per_step] for i in range(0, len(block), args.groups_per_step)]
            rng.shuffle(steps)
            yield from steps


def distillation_loss(
    student: Any, tokenizer: Any, cuts: list[pd.DataFrame], args: argparse.Namespace
) -> torch.Tensor:
    """Logit error, pooled vector error and, within each query, the KL divergence."""
    part = pd.concat(cuts)
    batch = encode(tokenizer, part, args.max_length)
    target = torch.from_numpy(part["logit"].to_numpy(dtype=np.float32, copy=True))
    vectors = torch.from_numpy(np.stack(part["pooled"].tolist())).float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
        pooled = student.bert(**batch).pooler_output.float()
    logits = student.classifier(pooled)[:, 0]
    loss: torch.Tensor = mse_loss(logits, target)
    loss = loss + args.pooled_weight * mse_loss(pooled, vectors)
    sizes = [len(cut) for cut in cuts]
    for mine, theirs in zip(torch.split(logits, sizes), torch.split(target, sizes), strict=True):
        divergence = kl_div(mine.log_softmax(0), theirs.softmax(0), reduction="sum")
        loss = loss + args.list_weight * divergence / len(cuts)
    return loss


def train(student: Any, tokenizer: Any, groups: list[pd.DataFrame], args: argparse.Namespace) -> None:
    """Train for a fixed number of steps, with warm-up and a linear fall of the learning rate."""
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.01)
    warm_up = max(1, args.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, (args.steps - step) / (args.steps - warm_up)),
    )
    started, recent = time.monotonic(), 0.0
    for step, cuts in zip(range(1, args.steps + 1), batches(groups, args), strict=False):
        loss = distillation_loss(student, tokenizer, cuts, args)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        recent += loss.item()
        if step % 100 == 0:
            print(
                f"step {step} loss {recent / 100:.3f} {time.monotonic() - started:.0f} s",
                flush=True,
            )
            recent = 0.0
    student.eval()


@torch.inference_mode()
def held_out_spearman(student: Any, tokenizer: Any, groups: list[pd.DataFrame]) -> tuple[float, float]:
    """Rank correlation with the teacher: over all held-out pairs, and mean within a query."""
    scored = []
    for group in groups:
        parts = [group.iloc[i : i + 64] for i in range(0, len(group), 64)]
        logits = [student(**encode(tokenizer, part, 512)).logits[:, 0] for part in parts]
        scored.append(group.assign(student=torch.cat(logits).numpy()))
    within = [g["student"].corr(g["logit"], method="spearman") for g in scored]
    joined = pd.concat(scored)
    whole = joined["student"].corr(joined["logit"], method="spearman")
    return float(whole), float(np.nanmean(within))


def labelled_pairs(args: argparse.Namespace) -> pd.DataFrame:
    """Read the labelled pairs if they were kept, else make them."""
    if args.labels and args.labels.exists():
        return pd.read_parquet(args.labels)
    pairs = pd.read_parquet(args.pairs, columns=["query", "passage"])
    made = add_distractors(build_pairs(pairs, args.pseudo_queries, args.seed), args.distractors, args.seed)
    frame = add_labels(args.teacher, made)
    if args.labels:
        frame.to_parquet(args.labels)
    return frame


def save(student: Any, out: Path) -> None:
    """Store matrices in 8 bits and vectors in 16, with a config that asks for fp32 on loading.

    The student keeps the rounded weights, so that what is measured is what was saved.
    """
    stored = {
        name: weight.to(torch.float8_e4m3fn if weight.ndim == 2 else torch.float16).contiguous()
        for name, weight in student.state_dict().items()
    }
    student.config.dtype = "float32"
    student.config.save_pretrained(out)
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    student.load_state_dict({name: weight.float() for name, weight in stored.items()})


def main() -> None:
    """Label, prune, train, measure and save."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    frame = labelled_pairs(args)
    texts = frame["passage"].drop_duplicates().tolist()
    vocabulary = choose_vocabulary(AutoTokenizer.from_pretrained(args.teacher), texts, args.vocab_size)
    tokenizer = save_tokenizer(vocabulary, args.out)
    student = prune(args.teacher, tokenizer, frame, args)
    frame = frame.assign(pooled=frame["pooled"].map(lambda raw: np.frombuffer(raw, dtype=np.float16)))
    groups = make_groups(frame)
    random.Random(args.seed).shuffle(groups)  # noqa: S311
    count = int(len(groups) * args.held_out)
    parameters = sum(p.numel() for p in student.parameters())
    print(f"{parameters} parameters, {len(frame)} pairs, {len(groups)} queries, {count} held out", flush=True)
    train(student, tokenizer, groups[count:], args)
    save(student, args.out)
    whole, within = held_out_spearman(student, tokenizer, groups[:count])
    print(f"held-out Spearman with the teacher: {whole:.3f} overall, {within:.3f} within a query")


if __name__ == "__main__":
    main()
