"""``rankmill serve``: start the gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import click
from pydantic import Field

from rankmill.cli import options
from rankmill.extensions.gateway.settings import GatewaySettings, name_and_model
from rankmill.jobs.contract.errors import ConfigError, EmbeddedError
from rankmill.jobs.runtime.connection import check_mode, client_for, connect, impatient
from rankmill.jobs.runtime.durability import Concerns, read_durability, warn_of_risks
from rankmill.jobs.runtime.http import is_loopback, split_address
from rankmill.jobs.runtime.installation import require_packages
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import Periodic
from rankmill.producer.local.embedded import EmbeddedCluster

_LOOK_SECONDS = 0.5

_PACKAGES = ("fastapi", "fastapi_offline", "python_multipart", "uvicorn")


class ServeOptions(options.CommandOptions):
    """Options of serve."""

    embedded: bool = False
    """Start a server and workers on this host, too."""
    models: Annotated[tuple[str, ...], Field(title="TEXT")] = Field((), alias="model")
    """Model to serve; repeat the option for several. The first is for requests without a model.  [default:
    the setting]
    """
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port to listen on; 0 means any free port."""


@options.command("serve")
@options.of(ServeOptions)
@options.flags(
    "gateway_address",
    "gateway_grpc_address",
    "gateway_open",
    "redis_url",
    "queue",
    "registry",
    "workers",
    "device",
    "backend",
    "precision",
    "log_level",
    prefix="gateway_",
)
def serve(config: str | None, asked: ServeOptions, **flags: Any) -> None:
    """Serve scores over HTTP and gRPC, as rerank servers do.

    The gateway has the paths of TEI, Cohere, Jina, vLLM, infinity and Voyage; /docs lists them. The gateway
    itself does not load a model: the workers of the Redis server score. With --embedded, this command starts
    a server and workers. The gateway runs until SIGTERM or Ctrl-C, and then finishes the requests in
    progress.

    The gateway listens on loopback by default. An address that other hosts reach needs keys (rankmill
    keys create) or --open.
    """
    if asked.embedded and flags["redis_url"] is not None:
        raise click.UsageError("give either --redis or --embedded")
    options.refuse_of_workers(embedded=asked.embedded)
    models = asked.models
    if models:
        first = next((model for model in models if model != "*"), None)  # `*` lets requests name any model
        flags |= {"model": first and name_and_model(first)[1], "gateway_models": ",".join(models)}
    settings = load_settings(flags, config)
    own = settings.of(GatewaySettings)
    set_up(settings.log_level, settings.log_format)
    require_packages(_PACKAGES, "gateway", "serving")
    from rankmill.extensions.gateway.app import make_app
    from rankmill.extensions.gateway.gateway import Gateway, load_additions
    from rankmill.extensions.gateway.keys.api_keys import KeyStore
    from rankmill.extensions.gateway.serve import PORT, keys_needed
    from rankmill.extensions.gateway.serve import serve as run

    host, usual = split_address("gateway_address", own.gateway_address, PORT)
    at = (host, usual if asked.port is None else asked.port)
    additions = load_additions(settings)
    with ExitStack() as stack:
        url = settings.redis_url
        failed: list[EmbeddedError] = []
        if asked.embedded:
            cluster = stack.enter_context(EmbeddedCluster(settings, models=len(own.gateway_models)))
            url = cluster.url()
            failed = stack.enter_context(_watched(cluster))
            for addition in additions:
                if advice := addition.advice(url):
                    click.echo(advice, err=True)
        if not url:
            raise ConfigError("no Redis server is named: give --redis, set REDIS_URL, or add --embedded")
        server = url

        def has_keys() -> bool:
            return bool(own.gateway_api_key) or KeyStore(connect(server, settings.redis_wait_seconds)).any()

        hosts = [host, *(host for addition in additions for host in addition.hosts)]
        needed = keys_needed(hosts, is_open=own.gateway_open, has_keys=has_keys)
        if not asked.embedded:
            keeps_data = needed == "always" or any(addition.keeps_data for addition in additions)
            _check_server(server, "only in Redis" if keeps_data else "every run")
        run(
            make_app(Gateway(settings, server, needed, additions), is_loopback=is_loopback(host)),
            at,
            lambda at: click.echo(
                f"rankmill serve: {', '.join(models or [settings.model])} at {at}", err=True
            ),
        )
        if failed:
            raise failed[0]


def _check_server(url: str, concerns: Concerns) -> None:
    """Refuse a server in cluster mode, and warn if its settings risk the loss of data. `concerns` says whose
    data count, as in `warn_of_risks`.
    """
    client = impatient(client_for(url, 0))
    check_mode(client)
    warn_of_risks(read_durability(client), url, concerns)
    client.close()


@contextmanager
def _watched(cluster: EmbeddedCluster) -> Iterator[list[EmbeddedError]]:
    """Stop this process by SIGTERM if the embedded server or its workers fail for good.

    Yields a list to which the error is added. End the ``with`` block before you stop the cluster: a stopped
    cluster would cause the signal, too.
    """
    failed: list[EmbeddedError] = []

    def look() -> None:
        try:
            if not failed:
                cluster.check()
        except EmbeddedError as error:
            failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    watch = Periodic("embedded", look, _LOOK_SECONDS)
    watch.start()
    try:
        yield failed
    finally:
        watch.stop(seconds=None)
