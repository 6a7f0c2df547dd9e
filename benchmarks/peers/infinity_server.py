# /// script
# dependencies = ["torch==2.13.0", "infinity-emb[torch,optimum,server]==0.0.78"]
# ///
"""infinity's server with its defaults: ``python infinity_server.py MODEL PORT``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    model, port = sys.argv[1:]
    program = Path(sys.executable).with_name("infinity_emb")
    command = [str(program), "v2", "--model-id", model, "--engine", "torch", "--no-bettertransformer"]
    os.environ["INFINITY_ANONYMOUS_USAGE_STATS"] = "0"
    os.execv(program, [*command, "--host", "127.0.0.1", "--port", port, "--log-level", "warning"])
