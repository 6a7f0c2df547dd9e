"""``rankmill exporter``: serve the live page, and the cluster's metrics to Prometheus."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from rankmill.cli import options
from rankmill.cluster.exporter import exporter_app
from rankmill.jobs.runtime.connection import client_for, impatient
from rankmill.jobs.runtime.http import serve
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.passwords import mask_url
from rankmill.jobs.runtime.settings import load_settings


@options.command("exporter")
@options.settings("redis_url", "exporter_address", "exporter_hosts")
def exporter(config: str | None, **flags: Any) -> None:
    """Serve the live page, and metrics to Prometheus.

    Runs until SIGTERM or Ctrl-C. / is the live page; /metrics has the metrics of queues, workers and runs,
    read from Redis; /sd lists the addresses of the workers' own metrics for Prometheus' HTTP service
    discovery; /healthz answers 200 while the exporter is alive. The exporter keeps running while Redis does
    not answer, and reports that.
    """
    settings = load_settings(flags, config)
    set_up(settings.log_level, settings.log_format)
    server = options.server(settings)
    app = exporter_app(impatient(client_for(server, settings.redis_wait_seconds)))
    host, port = serve(app, "exporter_address", settings.exporter_address, settings.exporter_hosts)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    click.echo(
        f"rankmill exporter: serving the metrics of {mask_url(server)} at http://{host}:{port}",
        err=True,
    )
    stop.wait()
