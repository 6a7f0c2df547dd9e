"""Answers a request about a model: ``python -m rankmill.extensions.lab.offline TASK``.

Each TASK is a module of this package. The request is JSON on standard input, and the answer is JSON on
standard output. If the model cannot be used, the answer is ``{"error": "..."}``, and the exit status is 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import RankmillError


def main(task: str) -> int:
    """Read a request from standard input, and write the answer of the module `task` to standard output.
    Returns the exit status.
    """
    request = json.load(sys.stdin)
    with suppress(OSError):  # if memory runs out, the kernel should kill this process and not its caller
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        with redirect_stdout(sys.stderr):  # because what libraries print is not part of the answer
            module = import_module(f"rankmill.extensions.lab.offline.{task}")
            run: Callable[[Mapping[str, Any]], dict[str, Any]] = getattr(module, task)
            answer, status = run(request), 0
    except (RankmillError, OSError, MemoryError) as error:
        answer, status = {"error": " ".join(str(error).split()) or type(error).__name__}, 1
    print(json.dumps(answer), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
