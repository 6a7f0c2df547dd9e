r"""Train the demo cross-encoder in ``demo-model/`` by distillation.

A small BERT cross-encoder learns to repeat the logits of a larger one (the teacher). The small one starts as
the teacher with fewer word pieces and feed-forward units (``prune.py``). The training pairs come from a
parquet file with the columns ``query`` and ``passage``, from more queries and passages made of those
(``pseudo_queries.py``), and from the senses of words in WordNet (``sense_pairs.py``).

    python -m examples.train_demo_model --teacher TEACHER_DIR --pairs PAIRS.parquet \
        --wordnet /usr/share/wordnet --out OUT_DIR
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from torch.nn.functional import kl_div, mse_loss
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.prune import choose_vocabulary, prune, save_tokenizer
from examples.pseudo_queries import add_distractors, build_pairs
from examples.sense_pairs import build_sense_pairs


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--teacher", type=Path, required=True, help="BERT cross-encoder folder")
    parser.add_argument("--pairs", type=Path, required=True, help="parquet: query, passage")
    parser.add_argument("--wordnet", type=Path, required=True, help="folder with WordNet's data files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--labels", type=Path, help="keep the teacher's labels in this parquet")
    parser.add_argument("--continue-from", type=Path, help="a trained model, instead of a pruned teacher")
    parser.add_argument("--pseudo-queries", type=int, default=10_000)
    parser.add_argument("--sense-queries", type=int, default=9_000, help="made from WordNet")
    parser.add_argument("--distractors", type=int, default=2, help="made for each query")
    parser.add_argument("--vocab-size", type=int, default=7800)
    parser.add_argument("--intermediate", type=int, default=608, help="feed-forward units kept")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--groups-per-step", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=8, help="passages per query and step")
    parser.add_argument("--max-length", type=int, default=144, help="tokens per pair in training")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--list-weight", type=float, default=2.0)
    parser.add_argument("--pooled-weight", type=float, default=5.0)
    parser.add_argument("--held-out", type=float, default=0.008, help="share of the queries")
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
    """Add the teacher's logit and pooled vector (fp16 bytes) to every pair."""
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


def make_student(teacher: Path, tokenizer: Any, frame: pd.DataFrame, args: argparse.Namespace) -> Any:
    """The teacher, cut down to the tokenizer's pieces and `--intermediate` units, or the model
    `--continue-from`.
    """
    if args.continue_from:
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForSequenceClassification.from_pretrained(args.continue_from, **options)
    big: Any = AutoModelForSequenceClassification.from_pretrained(teacher).float().eval()
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    rows = AutoTokenizer.from_pretrained(teacher).convert_tokens_to_ids(pieces)
    sample = frame.sample(min(len(frame), 4000), random_state=args.seed)
    sample = sample.sort_values("passage", key=lambda text: text.str.len())
    parts = [sample.iloc[i : i + 50] for i in range(0, len(sample), 50)]
    batches = [encode(tokenizer, part, args.max_length) for part in parts]
    return prune(big, big.bert.embeddings.word_embeddings.weight[rows].detach(), batches, args.intermediate)


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
    """The weighted sum of the errors of logits and pooled vectors and of the KL divergence within queries."""
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
def report(name: str, student: Any, tokenizer: Any, groups: list[pd.DataFrame]) -> None:
    """Print the rank correlation with the teacher, over all held-out pairs and as the mean within a query."""
    scored = []
    for group in groups:
        parts = [group.iloc[i : i + 64] for i in range(0, len(group), 64)]
        logits = [student(**encode(tokenizer, part, 512)).logits[:, 0] for part in parts]
        scored.append(group.assign(student=torch.cat(logits).numpy()))
    within = np.nanmean([g["student"].corr(g["logit"], method="spearman") for g in scored])
    joined = pd.concat(scored)
    whole = joined["student"].corr(joined["logit"], method="spearman")
    print(
        f"{name}: held-out Spearman with the teacher {whole:.3f} overall, {within:.3f} within a query",
        flush=True,
    )


def labelled_pairs(args: argparse.Namespace) -> pd.DataFrame:
    """Read the labelled pairs if they were kept, or else make them."""
    if args.labels and args.labels.exists():
        return pd.read_parquet(args.labels)
    pairs = pd.read_parquet(args.pairs, columns=["query", "passage"])
    made = add_distractors(build_pairs(pairs, args.pseudo_queries, args.seed), args.distractors, args.seed)
    senses = build_sense_pairs(args.wordnet, args.sense_queries, args.seed)
    frame = add_labels(args.teacher, pd.concat([made, senses], ignore_index=True))
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
    student = make_student(args.teacher, tokenizer, frame, args)
    frame = frame.assign(pooled=frame["pooled"].map(lambda raw: np.frombuffer(raw, dtype=np.float16)))
    groups = make_groups(frame)
    random.Random(7).shuffle(groups)  # noqa: S311  # with any seed, the same are held out
    count = int(len(groups) * args.held_out)
    parameters = sum(p.numel() for p in student.parameters())
    print(f"{parameters} parameters, {len(frame)} pairs, {len(groups)} queries, {count} held out", flush=True)
    report("at the start", student, tokenizer, groups[:count])
    train(student, tokenizer, groups[count:], args)
    save(student, args.out)
    report("at the end", student, tokenizer, groups[:count])


if __name__ == "__main__":
    main()
