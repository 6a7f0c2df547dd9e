"""Converts models into graphs of OpenVINO and caches the graphs, so that the next worker starts sooner."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from rankmill.jobs.system import system
from rankmill.workers.backends.base import ROW_TOKENS, LayerShape, ModelFiles
from rankmill.workers.backends.openvino.backend import compile_graph, core, openvino
from rankmill.workers.backends.openvino.weights import shrink
from rankmill.workers.backends.speed import INT8
from rankmill.workers.host.disk_cache import build_once, cache_name, is_kept, kept_as, version

_VERSION = 6
"""Version of the conversion to OpenVINO. It changes when the same model would give another graph."""

_FILE = "model.xml"

logger = logging.getLogger(__name__)


def openvino_graph(files: ModelFiles, precision: str) -> Any:
    """Return OpenVINO's graph of a model, from the cache or converted now.

    Parameters
    ----------
    files
        The model's files. If the cache folder is not writable, every worker converts for itself.
    precision
        If it is a kind of int8, the weights have 8 bits, and `INT8` says how many of them share a scale. For
        any other precision, the weights are in float32.
    """
    group, _ = INT8.get(precision, (None, precision))
    kind = "fp32" if group is None else f"int8-{group}"
    packages = map(version, ("torch", "transformers", "openvino"))
    made_from = cache_name(files.source, files.revision, str(_VERSION), kind, *packages)
    folder = files.cache / "openvino" / made_from
    if is_kept(folder, files.cache):
        files.copies.append(kept_as(folder))
        return core().read_model(folder / _FILE)
    started = system.monotonic()
    # imported here, because it imports torch, which is not needed if the graph is in the cache
    from rankmill.workers.backends.traceable import traceable

    def change(classifier: Any) -> None:
        if group is not None:
            from rankmill.workers.backends.openvino.recipe import apply_recipe

            apply_recipe(classifier, files.source, files.revision)

    scorer = traceable(files, change)
    graph = graph_of(scorer, scorer.example(), precision)
    logger.info("converted %s for OpenVINO in %.1f s", files.source, system.monotonic() - started)
    try:
        files.copies.append(kept_as(build_once(folder, partial(_save, graph, files))))
    except (OSError, RuntimeError) as error:
        logger.warning("cannot keep the OpenVINO graph of %s: %s", files.source, error)
    return graph


def _save(graph: Any, files: ModelFiles, folder: Path) -> None:
    # If the model's files have changed meanwhile, this raises an error, so that the cache keeps no wrong
    # graph.
    files.check_unchanged()
    openvino.save_model(graph, folder / _FILE, compress_to_fp16=False)
    core().read_model(folder / _FILE)  # reading fails if a full disk has cut the file short


def graph_of(module: Any, example: tuple[Any, ...], precision: str) -> Any:
    """Convert a PyTorch module into a graph of OpenVINO for any number of rows and tokens.

    OpenVINO's frontend is called directly, because `openvino.convert_model` takes seconds longer.

    Parameters
    ----------
    module
        The PyTorch module.
    example
        Inputs of the module, with which it is traced.
    precision
        In a kind of int8, the graph's weights have 8 bits; in other precisions they are float32.
    """
    import torch
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # PyTorch warns that shapes may be fixed; tests vary them
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    decoder = TorchScriptPythonDecoder(traced)  # in a variable: the frontend does not keep it alive
    frontend = FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    return _in_groups(graph, precision)


def _in_groups(graph: Any, precision: str) -> Any:
    group, _ = INT8.get(precision, (None, precision))
    if group is not None:
        shrink(graph, group)
    return graph


def timed_layer(shape: LayerShape, precision: str) -> Callable[[], object]:
    """Make a function that runs a layer with random weights once in OpenVINO, for timing."""
    graph = _in_groups(_layer(shape).clone(), precision)
    request = compile_graph(graph, precision).create_infer_request()
    hidden = np.random.default_rng(0).standard_normal(
        (shape.rows, ROW_TOKENS, shape.hidden), dtype=np.float32
    )
    return lambda: request.infer([hidden])


@lru_cache(maxsize=1)  # all precisions are made from the same graph
def _layer(shape: LayerShape) -> Any:
    from rankmill.workers.backends.layer import TimedLayer, example

    return graph_of(TimedLayer(shape), (example(shape),), "fp32")
