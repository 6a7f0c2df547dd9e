"""The ONNX file of a model: the one that the model ships with, or one that is exported once and cached."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnxruntime
from google.protobuf.message import Message

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.model_files import model_files
from rankmill.jobs.system import system
from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.batches.tokens import INPUTS
from rankmill.workers.host.disk_cache import build_once, cache_name, is_kept, kept_as, version
from rankmill.workers.host.model_file import model_file

_VERSION = 4
"""Version of the export; it changes when the same model would give another file."""

OPSET = 17
_FILE = "model.onnx"

logger = logging.getLogger(__name__)


def onnx_file(files: ModelFiles, precision: str) -> Path:
    """The ONNX file to run; it is exported now if it is not cached.

    Parameters
    ----------
    files
        The model's files.
    precision
        ``fp32``, ``fp16``, ``int8-dynamic`` or ``int8-dynamic-7bit``.
    """
    shipped = _shipped(files) if precision == "fp32" else None
    if shipped is not None:
        logger.info("using the model's own %s", shipped.name)
        return shipped
    versions = [*(version(name) for name in ("torch", "transformers", "onnx")), onnxruntime.__version__]
    name = cache_name(files.source, files.revision, str(_VERSION), str(OPSET), precision, *versions)
    folder = files.cache / "onnx" / name
    if is_kept(folder, files.cache):
        files.copies.append(kept_as(folder))
        return folder / _FILE

    def export(folder: Path) -> None:
        started = system.monotonic()
        _export(files, precision, folder)
        files.check_unchanged()  # otherwise it would be cached under the name of other files
        logger.info("exported %s as %s in %.1f s", files.source, precision, system.monotonic() - started)

    build_once(folder, export)
    files.copies.append(kept_as(folder))
    return folder / _FILE


_SHIPPED = "onnx/model.onnx"
"""The path at which sentence-transformers and Optimum save a model's graph. Their quantized files are not
used, because these compute the head, and so the score, in fewer bits too.
"""


def _shipped(files: ModelFiles) -> Path | None:
    found = model_file(files.source, files.revision, _SHIPPED)
    if found is None:
        return None
    graph = onnx.load(found, load_external_data=False).graph
    _check_external(graph, found, files.source)
    inputs = [each.name for each in graph.input]
    logits = graph.output[0].type.tensor_type
    shape = [size.dim_value for size in logits.shape.dim]
    one_output = files.layout.task == "classifier" and files.config.num_labels == 1
    if (
        one_output
        and set(inputs) <= set(INPUTS)
        and shape[1:] in ([], [1])
        and logits.elem_type == onnx.TensorProto.FLOAT
    ):
        return found
    logger.warning("not using %s: it does not make one score per pair from %s", found, ", ".join(INPUTS))
    return None


def _check_external(graph: onnx.GraphProto, file: Path, source: str | Path) -> None:
    """Refuse a graph whose weights are in files that do not belong to the model."""
    known = {path.as_posix() for path in model_files(source).values()} if isinstance(source, Path) else None
    locations = [PurePosixPath(each.value) for each in _external(graph) if each.key == "location"]
    for location in dict.fromkeys(locations):
        outside = location.is_absolute() or ".." in location.parts
        if outside or (known is not None and (file.parent / location).as_posix() not in known):
            raise SpecError(
                f"{file} has weights in {str(location)!r}, which is hidden or not in its folder: put "
                "that beside the graph under a name that is not hidden, or remove the graph"
            )


def _external(message: Any) -> Iterator[onnx.StringStringEntryProto]:
    """Everything that a graph says about weights in other files, at any depth."""
    for field, value in message.ListFields():
        for each in [value] if isinstance(value, Message) else value if field.message_type else ():
            if isinstance(message, onnx.TensorProto) and field.name == "external_data":
                yield each
            else:
                yield from _external(each)


def _export(files: ModelFiles, precision: str, folder: Path) -> None:
    """Export the model to a file in `folder`."""
    from rankmill.workers.backends.traceable import traceable  # torch, which a cached file does not need

    scorer = traceable(files)
    whole, final = folder / "fp32.onnx", folder / _FILE
    export(scorer, dict(zip(scorer.inputs, scorer.example(), strict=True)), "logits", whole)
    if precision == "fp32":
        whole.rename(final)
        return
    if precision == "fp16":
        _halve(whole, final, scorer.head)
    else:
        _quantize(whole, final, precision)
    whole.unlink()


def export(module: Any, example: Mapping[str, Any], output: str, file: Path) -> None:
    """Write a torch module as a graph for any number of rows and tokens; `example` has its inputs by name.

    This is the exporter that traces: PyTorch's other exporter takes 5 to 10 times as long and needs another
    package.
    """
    import torch

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # PyTorch warns that shapes may be fixed; tests vary them
        torch.onnx.export(
            module,
            tuple(example.values()),
            str(file),
            input_names=list(example),
            output_names=[output],
            dynamic_axes={name: {0: "rows", 1: "tokens"} for name in example} | {output: {0: "rows"}},
            opset_version=OPSET,
            dynamo=False,
        )


def _halve(whole: Path, final: Path, head: str) -> None:
    """Convert a graph to fp16, except the module `head` and everything after it."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(whole)
    scope = f"/{head.replace('.', '/')}/"
    exact = [node.name for node in model.graph.node if node.name.startswith(scope) or "logits" in node.output]
    half = convert_float_to_float16(model, keep_io_types=True, node_block_list=exact)
    casts = {node.output[0]: node for node in half.graph.node if node.op_type == "Cast"}
    for cast in casts.values():  # remove casts to fp16 and back between two nodes that stay in float32
        before = casts.get(cast.input[0])
        if before and (_type(before), _type(cast)) == (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT):
            cast.input[0] = before.input[0]
    onnx.save(half, final)


def _type(cast: onnx.NodeProto) -> int:
    return int(next(each.i for each in cast.attribute if each.name == "to"))


def _quantize(whole: Path, final: Path, precision: str) -> None:
    """Quantize matrices to 8 bits; their inputs are quantized when the model runs (dynamic quantization)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.getLogger().disabled, before = True, logging.getLogger().disabled  # hides useless advice
    try:
        quantize_dynamic(
            whole,
            final,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=precision.endswith("7bit"),
        )
    finally:
        logging.getLogger().disabled = before
