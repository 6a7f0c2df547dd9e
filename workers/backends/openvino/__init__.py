"""OpenVINO: x86 CPUs."""

from __future__ import annotations

from workers.backends.base import Backend, BackendKind, ModelFiles, is_installed


def _load(files: ModelFiles, device: str, precision: str) -> Backend:
    from workers.backends.openvino.backend import OpenVinoBackend
    from workers.backends.openvino.graph import openvino_graph

    graph = openvino_graph(files.source, files.config, precision, files.cache, files.classifier)
    return OpenVinoBackend(graph, precision)


def _lacks(device: str, precision: str) -> str | None:
    if precision == "int8" and not is_installed("nncf"):
        return "int8 needs NNCF (pip install rankmill[openvino-int8])"
    return None


KIND = BackendKind(
    name="openvino",
    packages=("openvino",),
    machines=("x86_64", "AMD64"),
    precisions={"cpu": ("fp32", "bf16", "int8")},
    load=_load,
    lacks=_lacks,
)
