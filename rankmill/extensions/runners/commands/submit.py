"""``rankmill submit``: hand files to runners, and do not wait."""

from __future__ import annotations

import json
import os

import click

from rankmill.cli import options
from rankmill.cli.request import GROUPS, SETTINGS, file_options, refuse_stride
from rankmill.extensions.runners.store import open_store
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.client.sync_client import Client


@options.command("submit", groups=GROUPS)
@file_options
@options.settings(*SETTINGS, "redis_url", "file_queue", others=("model",), logs=True)
@click.option("--webhook", metavar="URL", help="http or https URL that a runner calls at the run's end.")
@options.as_json
@options.quiet
def submit(request: FileRequest, settings: Settings, webhook: str | None, as_json: bool, quiet: bool) -> None:
    """Hand INPUT files to runners, which score their rows.

    The options for files and models are those of rankmill score, but -o must name the output, and files must
    not be standard input or output. A runner on any host that sees the files scores them with live workers,
    even after this process has ended. The command prints the run's id, which rankmill wait, status and cancel
    take.
    """
    refuse_stride(settings)
    request = request.at_home()  # before the server is asked, because `at_home` may refuse the request
    there = os.path.isfile(request.output or "")  # noqa: PTH113 -- false if this user may not look
    if there and not request.force:
        raise InputError(f"{request.output} exists already; replace it with --force or name another with -o")
    options.server(settings)
    client = Client(settings=settings)
    run = client.submit_request(request, webhook=webhook)
    store = open_store(client.store.redis, settings)
    if not quiet and not store.runners():
        click.echo(
            f"no runner takes runs of queue {store.queue.name!r} yet; start one with: rankmill runner",
            err=True,
        )
    click.echo(json.dumps({"id": run.id}) if as_json else run.id)
