"""What the headers of safetensors say before anything else of them is read; imports no torch."""

from __future__ import annotations

import json
import socket
from math import prod
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.runtime.limits import total_memory

_MOST = 100 << 20
"""Bytes of a header; the safetensors library refuses longer ones."""

_FLOATS = ("F", "BF")
"""How the names of number formats begin that are loaded as float32."""


def check_headers(folder: Path, name: str) -> None:
    """Refuse weights that cannot be loaded here, in milliseconds: reading 100 GB for a digest takes minutes.

    Raises
    ------
    SpecError
        A file is longer or shorter than its header says, or has no header.
    WorkerError
        The model does not fit into the memory of this host.
    OSError
        A file cannot be read.
    """
    needed = sum(_loaded_bytes(file, name) for file in sorted(folder.glob("*.safetensors")))
    there = total_memory()
    if needed > there:
        raise WorkerError(
            f"there is not enough memory to load model {name}: in float32 it needs "
            f"{needed / 2**30:,.1f} GiB, and worker host {socket.gethostname()} has {there / 2**30:,.1f} GiB"
        )


def _loaded_bytes(file: Path, name: str) -> int:
    """Bytes of the file's tensors in memory."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(_MOST, size - 8):
            raise SpecError(f"{file.name} of model {name} is damaged or cut off: it has no header")
        header = opened.read(length)
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((int(each["data_offsets"][1]) for each in tensors.values()), default=0)
        loaded = sum(map(_in_memory, tensors.values()))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise SpecError(f"{file.name} of model {name} is damaged: its header cannot be read") from None
    if end != size:
        raise SpecError(f"{file.name} of model {name} has {size:,} bytes, and its header describes {end:,}")
    return loaded


def _in_memory(tensor: dict[str, Any]) -> int:
    first, last = tensor["data_offsets"]
    return 4 * prod(tensor["shape"]) if tensor["dtype"].startswith(_FLOATS) else int(last - first)
