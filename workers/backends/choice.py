"""Which backend ``auto`` means for a model, and whether the one asked for can run it."""

from __future__ import annotations

import importlib.util
import logging
import platform
from typing import Any

from jobs.errors import SpecError
from workers.backends.first_token import reads_first_token

logger = logging.getLogger(__name__)


def choose_backend(setting: str, config: Any, device: str) -> str:
    """``torch`` or ``openvino``. ``auto`` is OpenVINO wherever that can run the model.

    Parameters
    ----------
    setting
        ``auto``, ``torch`` or ``openvino``.
    config
        The model's, from transformers.
    device
        ``cpu``, ``cuda`` or ``mps``.

    Raises
    ------
    SpecError
        OpenVINO is asked for and cannot run this model here.
    """
    if setting == "torch" or (setting == "auto" and device != "cpu"):
        return "torch"
    obstacle = _obstacle(config, device)
    if obstacle is None:
        return "openvino"
    if setting == "openvino":
        raise SpecError(f"backend openvino cannot be used: {obstacle}; --backend torch does without it")
    logger.info("backend torch, not openvino: %s", obstacle)
    return "torch"


def _obstacle(config: Any, device: str) -> str | None:
    """What keeps OpenVINO from running the model on this device."""
    if device != "cpu":
        return f"it runs on CPUs, not on {device}"
    if platform.machine() not in {"x86_64", "AMD64"}:
        return f"it is for x86 CPUs, not for {platform.machine()}"
    if importlib.util.find_spec("openvino") is None:
        return "it is not installed (pip install rankmill[openvino])"
    if not reads_first_token(config):
        return f"it is not known to score {config.model_type} models as PyTorch does"
    return None
