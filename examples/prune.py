"""Make a smaller BERT from a large one, with fewer word pieces and feed-forward units."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

Batch = dict[str, torch.Tensor]


def choose_vocabulary(tokenizer: Any, texts: list[str], size: int) -> list[str]:
    """Pick the special tokens, the single characters and the pieces that are likely to be used.

    A piece's use is the sum of its frequency in the texts and a guess by Zipf's law from its place in the
    teacher's vocabulary, which is roughly sorted by frequency. So ordinary words stay whole.
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


def keep_units(inputs: torch.Tensor, weight: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the columns of a linear layer to keep, and the weights that best replace the whole.

    The function removes one column at a time, always the column whose removal costs least after the others
    are adjusted by least squares, as in the Optimal Brain Surgeon (Hassibi and Stork, 1993).

    Parameters
    ----------
    inputs
        Sum of the outer products of the layer's inputs (columns by columns, float64).
    weight
        The layer's matrix (rows by columns).
    count
        How many columns to keep.

    Returns
    -------
    tuple
        The indices of the kept columns, and their new weights (rows by count).
    """
    kept = torch.arange(len(inputs))
    ridge = 1e-4 * inputs.diagonal().mean()
    inverse = torch.linalg.inv(inputs + ridge * torch.eye(len(inputs), dtype=torch.float64))
    weight = weight.double().clone()
    while len(kept) > count:
        gone = torch.zeros(len(kept), dtype=torch.bool)
        for _ in range(min(64, len(kept) - count)):
            cost = (weight**2).sum(0) / inverse.diagonal().clamp_min(1e-30)
            worst = int(cost.masked_fill(gone, float("inf")).argmin())
            row, pivot = inverse[worst].clone(), float(inverse[worst, worst])
            weight.addr_(weight[:, worst].clone(), row, alpha=-1 / pivot)
            inverse.addr_(row, row, alpha=-1 / pivot)
            gone[worst] = True
        kept, weight, inverse = kept[~gone], weight[:, ~gone], inverse[~gone][:, ~gone]
    return kept, weight.float()


@torch.no_grad()
def prune(teacher: Any, embeddings: torch.Tensor, batches: list[Batch], units: int) -> Any:
    """The teacher with other word embeddings and `units` feed-forward units in each layer.

    `batches` are texts in the new vocabulary. The layers are pruned in order; the inputs of a layer come from
    the pruned layers before it, so that its new weights also correct their errors.
    """
    changes: dict[str, Any] = {"vocab_size": len(embeddings), "intermediate_size": units}
    changes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**(teacher.config.to_dict() | changes), attn_implementation="eager")
    student: Any = BertForSequenceClassification(config).eval()
    weights = teacher.state_dict() | {"bert.embeddings.word_embeddings.weight": embeddings}
    weights = {
        name: value for name, value in weights.items() if value.shape == student.state_dict()[name].shape
    }
    student.load_state_dict(weights, strict=False)
    masks = [batch["attention_mask"].bool() for batch in batches]
    states = [student.bert.embeddings(b["input_ids"], token_type_ids=b["token_type_ids"]) for b in batches]
    for old, new in zip(teacher.bert.encoder.layer, student.bert.encoder.layer, strict=True):
        states = [
            new.attention(state, mask[:, None, None, :].float().sub(1).mul(1e9))[0]
            for state, mask in zip(states, masks, strict=True)
        ]
        active = [old.intermediate(state[mask]).double() for state, mask in zip(states, masks, strict=True)]
        inputs = sum((a.T @ a for a in active), torch.zeros(1, dtype=torch.float64))
        kept, adjusted = keep_units(inputs, old.output.dense.weight, units)
        new.intermediate.dense.weight.copy_(old.intermediate.dense.weight[kept])
        new.intermediate.dense.bias.copy_(old.intermediate.dense.bias[kept])
        new.output.dense.weight.copy_(adjusted)
        new.output.dense.bias.copy_(old.output.dense.bias)
        states = [new.output(new.intermediate(state), state) for state in states]
    return student
