"""Chooses whether a network pads the rows of a batch or packs them end to end, by comparing the logits and
the speeds of padded and packed rows.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import numpy as np
import torch

from rankmill.workers.backends.base import Logits, OutOfMemory
from rankmill.workers.backends.torch.backend import TorchBackend
from rankmill.workers.backends.torch.networks import Network
from rankmill.workers.batches.tokens import Batch, Ids

_EXACT = 1e-4
"""In fp32 on a CPU, the logits of packed rows may differ from those of padded rows by this factor times the
largest logit. If all logits are below 1, they may differ by the factor itself.
"""

_CLOSE = {"fp16": 0.05, "bf16": 0.25, "fp8": 0.5}
"""For each precision on a GPU: the logits of packed rows may differ from those of padded rows by this factor
times the largest logit. If all logits are below 1, they may differ by the factor itself.
"""

_SHORT = (5, 1, 23, 9)
"""Lengths of the rows, in tokens, that are computed both packed and padded, to compare the logits."""

_LIKE = 96
_TOKENS = 8_192
"""Packed and padded rows are timed with a batch of about `_TOKENS` tokens, in rows of about `_LIKE` tokens.
"""

_WHOLE_BATCH = 65_536
_QUICK_SECONDS = 0.02
"""If a batch of `_TOKENS` tokens takes less than `_QUICK_SECONDS`, one of `_WHOLE_BATCH` tokens is timed
instead. On a fast device, starting a small batch takes longer than computing it.
"""

_AS_GOOD = 1.05
"""Packed rows may take this many times as long as padded ones in the test. In real batches, lengths differ
more, so packed rows gain more.
"""

_ROUNDS = 3

logger = logging.getLogger(__name__)


def has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Return whether this device has an attention kernel for packed rows (rows without padding)."""
    half = dtype in (torch.float16, torch.bfloat16)
    return device == "cuda" and half and torch.cuda.get_device_capability() >= (8, 0)


@torch.inference_mode()
def packs_exactly(network: Network) -> bool:
    """Return whether a network computes the same logits for packed and padded rows, in fp32 on the CPU."""
    if not network.prepare_packing():
        return False
    batch = _random(network, np.array(_SHORT))
    try:
        rows = network.pack(batch)
        logits = network.packed(rows.shape.taken_apart(torch.from_numpy(rows.filled(rows.shape))))
    except (RuntimeError, TypeError, ValueError) as error:  # for example, the model needs another attention
        logger.debug("rows cannot be packed: %s", error)
        return False
    expected = network(*map(torch.from_numpy, (batch.ids, batch.mask)))
    return _alike(logits.numpy(), expected.numpy(), _EXACT)


def pack_if_faster(backend: TorchBackend, network: Network) -> None:
    """Let a backend pack rows (no padding) if the logits stay right and packing is not much slower."""
    tokens = _TOKENS
    try:
        logits, seconds = _both_ways(backend, _like_real(network, tokens))
        if max(seconds.values()) < _QUICK_SECONDS:
            with suppress(OutOfMemory):
                seconds = _both_ways(backend, _like_real(network, _WHOLE_BATCH))[1]
                tokens = _WHOLE_BATCH
    except (OutOfMemory, RuntimeError, TypeError, ValueError) as error:
        # cannot pack: for example, the kernel lacks something that the model needs
        backend.packs = False
        logger.debug("rows are not packed: %s", error)
        return
    right = _alike(logits[True], logits[False], _CLOSE[backend.precision])
    if not right:
        logger.warning("packed rows give other logits than padded ones on this device: rows are padded")
    backend.packs = right and seconds[True] < _AS_GOOD * seconds[False]
    logger.info("a batch of %d tokens: padded %.2g s, packed %.2g s", tokens, seconds[False], seconds[True])


def _both_ways(backend: TorchBackend, batch: Batch) -> tuple[dict[bool, Logits], dict[bool, float]]:
    """Compute a batch with packed rows (``True``) and with padded rows (``False``), each several times.

    Returns the logits of each kind of rows, and the seconds of the fastest forward of each kind.
    """
    logits: dict[bool, Logits] = {}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS + 1):
        for packs, taken in seconds.items():
            backend.packs = packs
            started = time.perf_counter()
            logits[packs] = backend.submit(batch).result()
            taken.append(time.perf_counter() - started)
    return logits, {packs: min(taken[1:]) for packs, taken in seconds.items()}


def _like_real(network: Network, tokens: int) -> Batch:
    return _random(network, np.linspace(_LIKE - 8, _LIKE, max(tokens // _LIKE, 1)).astype(int))


def _random(network: Network, lengths: Ids) -> Batch:
    """Make a batch of random tokens with rows of these lengths. A length that exceeds the network's number of
    positions is reduced to it.
    """
    draw = np.random.default_rng(0)
    positions = max(getattr(network.model.config, "max_position_embeddings", None) or 0, 0) or _LIKE
    lengths = np.minimum(lengths, positions - network.first_position)
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    words = network.model.get_input_embeddings().num_embeddings
    return Batch.padded(draw.integers(0, words, mask.shape) * mask, None, mask)


def _alike(logits: Logits, expected: Logits, bound: float) -> bool:
    """Return whether `logits` differ from `expected` by at most `bound` times the largest expected logit.

    If all expected logits are below 1, return whether they differ by at most `bound`.
    """
    return bool(np.abs(logits - expected).max() <= bound * np.abs(expected).max(initial=1.0))
