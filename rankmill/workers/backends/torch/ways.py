"""Which way a network scores a batch, padded or packed: the scores are compared, and the speeds measured."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from rankmill.workers.backends.base import Logits, OutOfMemory
from rankmill.workers.backends.varlen import KERNEL_DTYPES
from rankmill.workers.batches.tokens import Batch, Ids

if TYPE_CHECKING:
    from rankmill.workers.backends.torch.backend import TorchBackend
    from rankmill.workers.backends.torch.networks import Network

_EXACT = 1e-4
"""How far a packed logit may be from the padded one, in fp32 on a CPU, in parts of the largest."""

_CLOSE = {"fp16": 0.05, "bf16": 0.25, "fp8": 0.5}
"""The same on a device, before the proof (`rankmill.workers.engine.proving`) compares with transformers."""

_SHORT = (5, 1, 23, 9)
"""Tokens of the rows that show whether a network may be packed."""

_LIKE = 96
_TOKENS = 8_192
"""Rows of up to 96 tokens, in a batch of so many: as batches are, which are sorted by length."""

_ROUNDS = 3

logger = logging.getLogger(__name__)


def kernel_lacks(device: str, dtype: torch.dtype) -> str | None:
    """Why packed rows have no kernel; ``None`` if there is one."""
    if device != "cuda":
        return f"none for {device}"
    if dtype not in KERNEL_DTYPES:
        return f"none for {dtype}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"none for {torch.cuda.get_device_name()}"
    return None


@torch.inference_mode()
def packs_exactly(network: Network) -> bool:
    """Whether packed rows have the logits of padded ones: in fp32, on the CPU, by the reference."""
    if not network.prepare_packing():
        return False
    batch = _random(network, np.array(_SHORT))
    try:
        rows = network.pack(batch)
        found = network.packed(rows.shape.taken_apart(torch.from_numpy(rows.filled(rows.shape))))
    except (RuntimeError, TypeError, ValueError) as error:  # of a model that asks for something else
        logger.debug("rows cannot be packed: %s", error)
        return False
    expected = network(*map(torch.from_numpy, (batch.ids, batch.mask)))
    return _alike(found.numpy(), expected.numpy(), _EXACT)


def pack_if_faster(backend: TorchBackend, network: Network) -> None:
    """Let a backend pack rows if that is right and faster on its device; no word is said if it cannot."""
    batch = _random(network, np.linspace(_LIKE - 8, _LIKE, _TOKENS // _LIKE).astype(int))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    logits: dict[bool, Logits] = {}
    try:
        for _ in range(_ROUNDS + 1):
            for packs, taken in seconds.items():
                backend.packs = packs
                started = time.perf_counter()
                logits[packs] = backend.submit(batch).result()
                taken.append(time.perf_counter() - started)
    except (OutOfMemory, RuntimeError, TypeError, ValueError) as error:  # of a kernel that lacks something
        backend.packs = False
        logger.debug("rows are not packed: %s", error)
        return
    padded, packed = (min(seconds[packs][1:]) for packs in (False, True))
    right = _alike(logits[True], logits[False], _CLOSE[backend.precision])
    if not right:
        logger.warning("packed rows give other logits than padded ones on this device: rows are padded")
    backend.packs = right and packed < padded
    logger.info("a batch of %d tokens: padded %.2g s, packed %.2g s", _TOKENS, padded, packed)


def _random(network: Network, lengths: Ids) -> Batch:
    """Rows of random tokens, padded, and no longer than the model's positions."""
    draw = np.random.default_rng(0)
    positions = getattr(network.model.config, "max_position_embeddings", None) or _LIKE
    lengths = np.minimum(lengths, positions - (network.first_position or 0))
    mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
    known = network.model.get_input_embeddings().num_embeddings
    return Batch(draw.integers(0, known, mask.shape) * mask, None, mask)


def _alike(found: Logits, expected: Logits, bound: float) -> bool:
    """Whether logits are numbers and no further apart than `bound`, in parts of the largest or of 1."""
    return bool(np.abs(found - expected).max() <= bound * np.abs(expected).max(initial=1.0))
