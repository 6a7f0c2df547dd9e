"""Describes the machine and makes Markdown tables, for all reports of measurements."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

import psutil

from rankmill.jobs.runtime.hosts import cpu_flags, cpu_name
from rankmill.jobs.runtime.limits import total_memory

INSTRUCTION_SETS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Instruction sets that determine how fast a model runs, by their names in Linux."""


def describe_machine(
    packages: Iterable[str] = ("torch", "transformers", "rq", "redis", "pyarrow"),
) -> dict[str, str]:
    """Return facts about this machine, and the installed versions of `packages`, as texts by label."""
    has = [name for name in INSTRUCTION_SETS if name in cpu_flags()]  # empty if the system lists no flags
    return {
        "CPU": cpu_name(),
        "cores": f"{psutil.cpu_count(logical=False)} ({psutil.cpu_count()} threads)",
        "instruction sets": ", ".join(has) or "not known",
        "memory": f"{total_memory() / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages),
    }


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, padded so that it is readable as text; columns of numbers are right-aligned."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (header, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    right = [
        all(cell[:1].isdigit() or cell[:1] in "+-" for cell in column[1:])
        for column in zip(*cells, strict=True)
    ]
    rule = ["-" * (width - 1) + ":" if r else "-" * width for width, r in zip(widths, right, strict=True)]
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join(
        "| "
        + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        + " |"
        for line in lines
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
