"""The command that serves the cluster's metrics."""

from __future__ import annotations

import signal
import threading

import click
import redis

from jobs.errors import ConfigError, RankmillError
from jobs.runtime.connection import impatient, mask_passwords
from jobs.runtime.http import serve
from jobs.runtime.logs import set_up
from jobs.runtime.settings import load_settings
from rankmill.cli.exits import EXIT_USAGE, fail, server_of
from rankmill.cluster.exporter import exporter_app


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--redis", "redis_url", help="The server; default: REDIS_URL.")
@click.option("--address", help="HOST:PORT to listen on; default: 127.0.0.1:9807, or the next free port.")
@click.option("--config", help="YAML file of settings.")
def exporter(redis_url: str | None, address: str | None, config: str | None) -> None:
    """Serve the cluster's live page, and its metrics to Prometheus, until SIGTERM or Ctrl-C.

    / is the page, for people; /metrics has queues, workers and runs as Redis knows them; /sd names the
    workers' own metrics, for Prometheus' HTTP service discovery; /healthz says that the exporter is
    alive. It stays up while Redis is away, and says so.
    """
    try:
        settings = load_settings({"redis_url": redis_url, "exporter_address": address}, config)
        set_up(settings.log_level, settings.log_format)
        server = server_of(settings)
        app = exporter_app(impatient(_client(server)))
        host, port = serve(app, "exporter_address", settings.exporter_address)
    except RankmillError as error:
        fail("rankmill exporter", error, EXIT_USAGE)
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    click.echo(
        f"rankmill exporter: serving the metrics of {mask_passwords(server)} at http://{host}:{port}",
        err=True,
    )
    stop.wait()


def _client(url: str) -> redis.Redis:
    try:
        return redis.Redis.from_url(url)
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}, got {mask_passwords(url)}") from None
