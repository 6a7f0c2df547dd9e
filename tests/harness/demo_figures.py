"""What transformers makes of the demo model, which is shipped with it.

    python -m tests.harness.demo_figures

writes it anew: where probes or model have changed, `tests/workers/engine/test_proving.py` says so.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.proving import DEMO_FIGURES, Proving, Shipped
from rankmill.workers.models.loading import load


def figures() -> Shipped:
    """What is shipped, measured now."""
    spec = ScoreSpec(model="demo", precision="bf16")
    with tempfile.TemporaryDirectory() as cache:
        proving = Proving(spec, load(spec, "cpu", "torch", cache), Path(cache))
        own, bf16 = proving.asked(large=False)
        return Shipped(of=proving.of_model, own=own, bf16=bf16)


def main() -> None:
    """Write the file."""
    DEMO_FIGURES.write_text(json.dumps(figures().model_dump()) + "\n")


if __name__ == "__main__":
    main()
