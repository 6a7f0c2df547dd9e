"""``rankmill exporter``: serve the live page, and the cluster's metrics to Prometheus."""

from __future__ import annotations

import signal

import click

from rankmill.cli import options
from rankmill.cluster.exporter import exporter_app
from rankmill.jobs.runtime.connection import check_mode, client_for, impatient
from rankmill.jobs.runtime.http import serve
from rankmill.jobs.runtime.passwords import mask_url
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_PORT = 9807


@options.command("exporter")
@options.settings("redis_url", "exporter_address", "exporter_hosts", prefix="exporter_", logs=True)
def exporter(settings: Settings) -> None:
    """Serve the live page, and metrics to Prometheus.

    Runs until SIGTERM or Ctrl-C. / is the live page; /metrics has the metrics of queues, workers and runs,
    read from Redis; /sd lists the addresses of the workers' own metrics for Prometheus' HTTP service
    discovery; /healthz answers 200 while the exporter is alive. While Redis does not answer, the exporter
    keeps running and reports that.
    """
    server = options.server(settings)
    client = impatient(client_for(server, settings.redis_wait_seconds))
    check_mode(client)
    app = exporter_app(client, settings)
    address, hosts = settings.exporter_address, settings.exporter_hosts
    host, port = serve(app, "exporter_address", address, hosts, usual=_PORT)
    stop = system.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    click.echo(
        f"rankmill exporter: serving the metrics of {mask_url(server)} at http://{host}:{port}",
        err=True,
    )
    stop.wait()
