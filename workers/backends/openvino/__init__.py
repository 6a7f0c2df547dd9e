"""OpenVINO: x86 CPUs."""

from __future__ import annotations

from collections.abc import Callable

from workers.backends.base import Backend, BackendKind, ModelFiles, is_installed
from workers.backends.layer import LayerShape
from workers.backends.speed import cpu_speeds


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from workers.backends.openvino.backend import OpenVinoBackend
    from workers.backends.openvino.graph import openvino_graph

    graph = openvino_graph(files, precision)
    if precision != "int8":
        return OpenVinoBackend(graph, precision)
    faster = cpu_speeds([KIND], files.config, files.cache).fastest([(KIND.name, "fp32"), (KIND.name, "bf16")])
    return OpenVinoBackend(graph, precision, faster[1] if faster else "fp32")


def _probe(shape: LayerShape, precision: str) -> Callable[[], object]:
    from workers.backends.openvino.probe import probe

    return probe(shape, precision)


def _lacks(device: str, precision: str) -> str | None:
    if precision == "int8" and not is_installed("nncf"):
        return "int8 needs NNCF (pip install 'rankmill[openvino-int8]')"
    return None


KIND = BackendKind(
    name="openvino",
    extra="worker",
    packages=("openvino",),
    machines=("x86_64", "AMD64"),
    precisions={"cpu": ("fp32", "bf16", "int8")},
    load=_load,
    probe=_probe,
    lacks=_lacks,
)
