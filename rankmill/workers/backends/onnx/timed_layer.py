"""Times a layer in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rankmill.workers.backends.base import LayerShape
from rankmill.workers.backends.layer import TimedLayer, example
from rankmill.workers.backends.onnx.backend import session
from rankmill.workers.backends.onnx.files import export
from rankmill.workers.host.device import threads


def timed_layer(shape: LayerShape) -> Callable[[], object]:
    """Make a function that runs a layer with random weights once, in fp32."""
    hidden = example(shape)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "layer.onnx"
        export(TimedLayer(shape), {"hidden": hidden}, "output", file)
        ready = session(file, "cpu", threads())
    return lambda: ready.run(None, {"hidden": hidden.numpy()})
