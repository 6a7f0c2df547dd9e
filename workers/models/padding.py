"""Whether a pair's score depends on the padding and the pairs beside it, tried with three pairs at each load.

Most models mask padding exactly. Others (Nyström attention, convolutions, hashing) read it, so that a pair's
score is another in each batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rankmill.jobs.contract.errors import WorkerError
from rankmill.workers.backends.base import Backend
from rankmill.workers.batches.tokens import Tokens, pad
from rankmill.workers.models.description import Description
from rankmill.workers.models.tokenizer import tokenize_pairs

_BOUNDS = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.25}
_BOUND_OF_FEW_BITS = 2.0
"""How much a logit may change, in parts of the largest, or of 1; docs/BACKENDS.md has what was measured."""

_TENSOR_CORES = 200
"""In fp32 on a GPU, products may have 10 bits: so many times more."""


@dataclass(frozen=True)
class Probe:
    """Three pairs, of which two are padded where they are together.

    ``name`` is that of the model, ``outputs`` how many logits it has for a pair.
    """

    name: str
    tokens: Tokens
    pad_id: int
    outputs: int

    @classmethod
    def of(cls, name: str, about: Description, max_length: int) -> Probe:
        """A probe for a model of at most `max_length` tokens; raises what its tokenizer raises."""
        tokenizer, longest = about.tokenizer, min(max_length, _exact_up_to(about.config) + 8)
        lengths = (min(longest, 8), max(longest - 16, min(longest, 8)), longest)
        passage = "b c d e f g h i " * longest
        tokens = Tokens.join([tokenize_pairs(tokenizer, ["a"], [passage], length) for length in lengths])
        return cls(name, tokens, tokenizer.pad_token_id or 0, len(about.labels))

    def check(self, backend: Backend) -> None:
        """Score the pairs alone and together.

        Raises
        ------
        WorkerError
            The scores differ by more than the precision explains.
        ValueError
            The output has another shape than the model's files say.
        """
        together = self._logits(backend, 0, 1, 2)[:2]
        alone = np.concatenate([self._logits(backend, row) for row in (0, 1)])
        with np.errstate(invalid="ignore"):  # what is no number fails row by row
            change = np.nanmax(np.abs(together - alone), initial=0.0)
        bound = _BOUNDS.get(backend.precision, _BOUND_OF_FEW_BITS)
        bound *= 1 if backend.device == "cpu" or backend.precision != "fp32" else _TENSOR_CORES
        bound *= np.nanmax(np.abs(alone), initial=1.0)
        if change > bound:
            raise WorkerError(
                f"model {self.name} cannot be scored in batches: with padding and other pairs beside it the "
                f"output for a pair changes by {change:.2g}, and in {backend.precision} it may by {bound:.2g}"
            )

    def _logits(self, backend: Backend, *rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        logits = backend.submit(pad([(self.tokens, np.array(rows))], self.pad_id)).result()
        expected = (len(rows),) if self.outputs == 1 else (len(rows), self.outputs)
        if logits.shape != expected:
            raise ValueError(
                f"its output for {len(rows)} pairs has shape {list(logits.shape)}, not {list(expected)}"
            )
        return logits


def _exact_up_to(config: Any) -> int:
    """Tokens up to which a model's attention may be exact, so that longer rows show what it does to them."""
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird
        return int((5 + 2 * config.num_random_blocks) * config.block_size)
    return 64  # of Reformer's and Nyströmformer's chunks, as they are by default
