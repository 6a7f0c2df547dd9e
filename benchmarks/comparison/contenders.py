"""The contenders of the comparison, and how to run one of them once."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.comparison.environments import ROOT, CannotInstall, python_for

LIMIT_SECONDS = 3600
"""Seconds for one run of one contender; a peer that hangs must not end the comparison."""

ANYWHERE = ("cpu", "cuda")


@dataclass(frozen=True)
class Contender:
    """A script of ``peers/``, the variant of it to run, and the devices for which it is meant."""

    name: str
    title: str
    script: str
    variant: str | None = None
    devices: tuple[str, ...] = ANYWHERE
    ours: bool = False


FP32 = Contender("st-fp32", "sentence-transformers, torch fp32", "st_torch.py", "fp32")
FP16 = Contender("st-fp16", "sentence-transformers, torch fp16", "st_torch.py", "fp16", ("cuda",))
ENGINE = Contender("engine", "rankmill, Engine.score", "rankmill_engine.py", ours=True)
ENGINE_INT8 = Contender(
    "engine-int8", "rankmill, Engine.score int8", "rankmill_engine.py", "int8", ("cpu",), ours=True
)
SCORE_FILE = Contender("score-file", "rankmill, score-file", "rankmill_file.py", ours=True)
SCORE_FILE_INT8 = Contender(
    "score-file-int8", "rankmill, score-file int8", "rankmill_file.py", "int8", ("cpu",), ours=True
)
CONTENDERS = (
    Contender("loop", "transformers, naive loop", "transformers_loop.py"),
    FP32,
    Contender("st-bf16", "sentence-transformers, torch bf16", "st_torch.py", "bf16"),
    FP16,
    Contender("st-onnx", "sentence-transformers, ONNX fp32", "st_onnx.py", "fp32", ("cpu",)),
    Contender("st-int8", "sentence-transformers, ONNX int8", "st_onnx.py", "int8", ("cpu",)),
    Contender("st-openvino", "sentence-transformers, OpenVINO", "st_openvino.py", "auto", ("cpu",)),
    Contender("st-openvino-fp32", "sentence-transformers, OpenVINO fp32", "st_openvino.py", "fp32", ("cpu",)),
    Contender("st-openvino-int8", "sentence-transformers, OpenVINO int8", "st_openvino.py", "int8", ("cpu",)),
    Contender("infinity", "infinity, torch", "infinity.py", "auto"),
    Contender("infinity-bf16", "infinity, torch bf16", "infinity.py", "bfloat16"),
    Contender("fastembed", "fastembed, ONNX int8", "fastembed_onnx.py", devices=("cpu",)),
    ENGINE,
    ENGINE_INT8,
    SCORE_FILE,
    SCORE_FILE_INT8,
)
"""The contenders, in the order of their runs and of the table."""


@dataclass
class Run:
    """The output of a contender's script in one run, or in one line the reason why it has no output.

    ``precision`` begins with the arithmetic of its matrix products: ``fp32``, ``bf16``, ``fp16`` or ``int8``.
    """

    name: str
    round: int
    seconds: float = 0.0
    load_seconds: float = 0.0
    precision: str = ""
    settings: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None


def run(
    contender: Contender, round_: int, model: Path, pairs: Path, output: Path, *, here: bool, times: int = 1
) -> Run:
    """Make the contender's environment if it needs one, and let its script score all pairs `times` times."""
    script = ROOT / "benchmarks" / "peers" / contender.script
    try:
        python = python_for(script, here=here)
    except CannotInstall as error:
        return Run(contender.name, round_, failure=f"cannot be installed: {error}")
    command = [str(python), str(script)]
    command += ["--model", str(model), "--pairs", str(pairs), "--output", str(output)]
    command += ["--variant", contender.variant] if contender.variant else []
    command += ["--times", str(times)] if times > 1 else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS, env=_environment()
        )
    except subprocess.TimeoutExpired:
        return Run(contender.name, round_, failure=f"not done after {LIMIT_SECONDS} s")
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1][:200] if lines else f"exit {done.returncode}"
        return Run(contender.name, round_, failure=reason.replace(f"{ROOT}/", ""))
    return Run(contender.name, round_, **json.loads(done.stdout.splitlines()[-1]))


def _environment() -> dict[str, str]:
    """This process's environment without variables that change the number of threads or the settings."""
    unwanted = ("RANKMILL_", "REDIS_URL", "OMP_", "MKL_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
