"""The tables of docs/reference/metrics.md, from the metrics themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import fakeredis
from prometheus_client.metrics_core import Metric
from rq import Queue

from rankmill.cluster.exporter import ClusterView, exporter_registry
from rankmill.extensions.gateway import metrics as gateway
from rankmill.workers.host import metrics


def written(text: str) -> str:
    """The document with its tables as they should be."""
    for place, families_of in _TABLES.items():
        families = families_of()
        text = re.sub(
            rf"(<!-- {place}: .*? -->\n).*?(<!-- end -->)",
            lambda found, families=families: found[1] + _table(families) + found[2],  # type: ignore[misc]
            text,
            flags=re.S,
        )
    return text


def _of_a_worker() -> list[Metric]:
    shown = "model", "revision", "backend", "device", "precision"
    metrics.models.labels(*shown).set(1)
    metrics.worker.info({"worker": "", "device": ""})
    found = {metric.name: metric for metric in metrics.REGISTRY.collect()}
    metrics.models.clear()
    others = [metric for each in (metrics.gpu, metrics.by_model) for metric in each.describe()]
    return list({**found, **{metric.name: metric for metric in others}}.values())


def _of_the_cluster() -> Iterable[Metric]:
    client = fakeredis.FakeRedis()
    Queue("some", connection=client).enqueue("rankmill.score_chunk")
    return exporter_registry(ClusterView(client)).collect()


def _of_a_gateway() -> list[Metric]:
    labelled = (gateway.requests, gateway.seconds, gateway.stages, gateway.pairs)
    for each in labelled:
        each.labels(*("" for _ in each._labelnames))
    found = {metric.name: metric for metric in gateway.REGISTRY.collect()}
    for each in labelled:
        each.clear()
    return list({**found, **{metric.name: metric for metric in gateway.by_model.describe()}}.values())


_TABLES: dict[str, Callable[[], Iterable[Metric]]] = {
    "worker": _of_a_worker,
    "cluster": _of_the_cluster,
    "gateway": _of_a_gateway,
}


def _table(families: Iterable[Metric]) -> str:
    rows = ["| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in families:
        if metric.name.startswith("process_"):
            continue
        name = metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
        names = metric.samples[0].labels if metric.samples else metric._labelnames  # type: ignore[attr-defined]
        labels = [label for label in names if label != "le"]
        shown = ", ".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |")
    return "\n".join(rows) + "\n"
