"""OpenVINO's graph of a model: converted once and cached, so that the next worker starts sooner."""

from __future__ import annotations

import logging
import warnings
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankmill.jobs.system import system
from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.backends.openvino.core import core, openvino
from rankmill.workers.host.disk_cache import build_once, cache_name, is_kept, kept_as, version

_VERSION = 4
"""Changes when the same inputs would make another graph."""

_FILE = "model.xml"

if TYPE_CHECKING:
    from rankmill.workers.backends.traceable import Traced

logger = logging.getLogger(__name__)


def openvino_graph(files: ModelFiles, precision: str) -> Any:
    """The graph to compile; converted now if it is not cached.

    Parameters
    ----------
    files
        Of the model. Where their cache cannot be written to, every worker makes its own graph.
    precision
        A kind of int8: weights in 8 bits; else they are in float32, for any precision.
    """
    kind = "int8" if precision.startswith("int8") else "fp32"
    packages = ("torch", "transformers", "openvino", *(["nncf"] if kind == "int8" else []))
    made_from = cache_name(files.source, files.revision, str(_VERSION), kind, *map(version, packages))
    folder = files.cache / "openvino" / made_from
    if is_kept(folder, files.cache):
        files.copies.append(kept_as(folder))
        return core().read_model(folder / _FILE)
    started = system.monotonic()
    from rankmill.workers.backends.traceable import traceable  # torch, which a kept graph does not need

    def change(classifier: Any) -> None:
        if kind == "int8":
            from rankmill.workers.backends.openvino.recipe import apply_recipe

            apply_recipe(classifier, files.source, files.revision)

    graph = graph_of(traceable(files, change), precision)
    logger.info("converted %s for OpenVINO in %.1f s", files.source, system.monotonic() - started)
    try:
        files.copies.append(kept_as(build_once(folder, partial(_save, graph, files))))
    except (OSError, RuntimeError) as error:
        logger.warning("cannot keep the OpenVINO graph of %s: %s", files.source, error)
    return graph


def _save(graph: Any, files: ModelFiles, folder: Path) -> None:
    files.check_unchanged()  # else it would be kept as that of other files
    openvino.save_model(graph, folder / _FILE, compress_to_fp16=False)
    core().read_model(folder / _FILE)  # which sees what a full disk has left out


def graph_of(scorer: Traced, precision: str) -> Any:
    """OpenVINO's graph of a module, for any number of rows and tokens.

    `rankmill.workers.backends.openvino.recipe` may have changed its weights. The frontend itself makes the
    graph: `openvino.convert_model` traces several times over, which takes seconds.
    """
    import torch
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # PyTorch warns that shapes may be fixed; tests vary them
        traced = torch.jit.trace(scorer, scorer.example(), check_trace=False)  # type: ignore[no-untyped-call]
    decoder = TorchScriptPythonDecoder(traced)  # named, as the frontend does not keep it alive
    frontend = FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    return _with_small_weights(graph) if precision.startswith("int8") else graph


def _with_small_weights(model: Any) -> Any:
    """The graph with weights in 8 bits, except for the names in `KEPT_EXACT`.

    Calibrating activations on a sample as well took 40 s for a small model and made its scores
    worse than any precision here, and no two workers would have the same sample.
    """
    import nncf

    from rankmill.workers.backends.openvino.recipe import KEPT_EXACT

    nncf.set_log_level(logging.ERROR)
    cheap = r".*/aten::matmul/.*"  # products of `first_token` that are not linear layers
    exact = nncf.IgnoredScope(patterns=[rf".*\.{KEPT_EXACT}/.*", cheap], validate=False)
    with redirect_stdout(StringIO()):  # a progress bar
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM, ignored_scope=exact)
