"""``rankmill workers``: lists the live workers, and gives them orders; ``start`` starts workers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import click
import redis

from rankmill.cli import options, watch
from rankmill.cli.show import echo
from rankmill.cli.workers import score_workers
from rankmill.cluster import tables
from rankmill.cluster.orders import find_worker, order_workers, queues_without, reachable, whole_name
from rankmill.cluster.snapshot import WorkerState, read_cluster
from rankmill.jobs.contract.errors import ExitCode, InputError
from rankmill.jobs.contract.home import model_of_run
from rankmill.jobs.protocol.orders import OrderName
from rankmill.jobs.protocol.worker_report import LAST_REPORTS
from rankmill.jobs.runtime.settings import Settings, load_settings

_ORDER_SECONDS = 60


@options.group("workers")
@watch.as_json
@watch.watching
def workers(client: redis.Redis, **shown_as: bool) -> None:
    """List the live workers; start, drain or warm some.

    The list shows the models that each worker has loaded, the CPU cores and the memory that the worker uses,
    and the share of chunks whose model was already loaded (hits). For the worker's GPU, the list shows the
    temperature, and the load and used memory of all processes together.
    """
    watch.show_cluster(
        client,
        lambda cluster: tables.live_table(cluster.workers),
        lambda cluster: json.dumps([worker.model_dump() for worker in cluster.workers]),
        **shown_as,
    )


workers.add_command(score_workers, "start")


def _reachable(context: click.Context) -> list[WorkerState]:
    """Return the workers that take orders, for a shell's completion; empty if the server does not answer."""
    try:
        given = {"redis_url": context.params.get("redis_url")}
        client = options.connection(load_settings(given, context.params.get("config")))
        return reachable(read_cluster(client, page_size=0).workers)
    except Exception:  # a shell that completes a word cannot show a message
        return []


def _names_of_workers(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    return [worker.name for worker in _reachable(context) if worker.name.startswith(begun)]


def _loaded_models(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    models = {model for worker in _reachable(context) if worker.report for model in worker.report.models}
    return sorted(model for model in models if model.startswith(begun))


def _names(*, required: bool) -> Callable[[options.Function], options.Function]:
    return click.argument(
        "names", metavar="NAME..." if required else "[NAME]...", nargs=-1, required=required,
        shell_complete=_names_of_workers,
    )  # fmt: skip


_wait = click.option(
    "--wait", "wait_seconds", type=click.FloatRange(min=0), default=_ORDER_SECONDS, metavar="SECONDS",
    help=f"Longest wait for the workers; 0 means no wait.  [default: {_ORDER_SECONDS}]",
)  # fmt: skip


def _order_command(
    name: OrderName, *arguments: options.Option
) -> Callable[[options.Function], click.Command]:
    """Make a decorator that turns a function into a subcommand of ``rankmill workers``.

    The subcommand gives workers the order that is called `name`. It has `arguments`, and the options that
    all orders have. The function gets a connection to the Redis server.
    """

    def wrap(function: options.Function) -> click.Command:
        @functools.wraps(function)
        def run(settings: Settings, **given: Any) -> None:
            function(options.connection(settings), **given)

        made: options.Function = run
        own: list[options.Option] = [*arguments, options.settings("redis_url"), _wait, options.as_json]
        for option in reversed(own):
            made = option(made)
        interrupted = "the order stays, and the worker carries it out"
        command = options.command(name, interrupted=interrupted)(made)
        workers.add_command(command)
        return command

    return wrap


@_order_command("drain", _names(required=True))
def drain(client: redis.Redis, names: tuple[str, ...], **given: Any) -> None:
    """Let workers finish their chunks and take no more.

    NAME is a worker's name or the beginning of it. A drained worker stays alive, with its models loaded,
    until it is resumed or stopped. A worker that is started again is not drained.
    """
    every = read_cluster(client, page_size=0).workers
    chosen = [find_worker(every, name) for name in dict.fromkeys(names)]
    for queue in queues_without(every, [worker.name for worker in reachable(chosen)]):
        echo(f"warning: no other worker takes the chunks of queue {queue!r}; they will wait", err=True)
    _order(client, chosen, "drain", **given)


@_order_command("resume", _names(required=True))
def resume(client: redis.Redis, names: tuple[str, ...], **given: Any) -> None:
    """Let drained workers take chunks again.

    NAME is a worker's name or the beginning of it.
    """
    _order(client, _chosen(client, names), "resume", **given)


@_order_command("warm", click.argument("model"), _names(required=False))
def warm(client: redis.Redis, model: str, names: tuple[str, ...], **given: Any) -> None:
    """Load a model before chunks need it.

    MODEL is a hub id, a directory on the workers' hosts, a name in the registry, or 'demo'. The model is
    loaded with the workers' own settings (precision, …). If necessary, the least recently used model is
    unloaded. NAME is a worker's name or the beginning of it; without NAME all workers load the model.
    """
    _order(client, _chosen(client, names), "warm", model_of_run(model), **given)


@_order_command("unload", click.argument("model", shell_complete=_loaded_models), _names(required=False))
def unload(client: redis.Redis, model: str, names: tuple[str, ...], **given: Any) -> None:
    """Free the memory of a model.

    MODEL is the name that rankmill workers shows. A worker first scores the chunks that it has claimed. It
    loads the model again when another chunk needs it, unless the worker is drained. NAME is a worker's name
    or the beginning of it; without NAME all workers unload the model.
    """
    _order(client, _chosen(client, names), "unload", model_of_run(model), **given)


@options.command("forget")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@options.settings("redis_url")
def forget(settings: Settings, names: tuple[str, ...]) -> None:
    """Forget workers that have stopped because of wrong scores.

    NAME is the worker's name or the beginning of it. Until you forget the worker, rankmill status reports it,
    and the runs to score again. All reports expire when no worker has stopped for this reason for a week. The
    reports of the latest 100 workers are kept.
    """
    client = options.connection(settings)
    reports = LAST_REPORTS.read(client)
    for name in names:
        worker = whole_name((report.worker for report in reports), name)
        if worker is None:
            stopped = ", ".join(dict.fromkeys(report.worker for report in reports)) or "none"
            raise InputError(f"no worker {name} has stopped for wrong scores; those that have: {stopped}")
        LAST_REPORTS.forget(client, [report for report in reports if report.worker == worker].__contains__)
        echo(f"{worker}: forgotten")


workers.add_command(forget)


def _chosen(client: redis.Redis, names: tuple[str, ...]) -> list[WorkerState]:
    every = read_cluster(client, page_size=0).workers
    chosen = [find_worker(every, name) for name in dict.fromkeys(names)] or reachable(every)
    if not chosen:
        raise InputError("no worker takes this order; rankmill workers lists the workers")
    return chosen


def _order(
    client: redis.Redis,
    chosen: list[WorkerState],
    order: OrderName,
    model: str | None = None,
    *,
    wait_seconds: float,
    as_json: bool,
) -> None:
    """Give an order to the `chosen` workers, and print the outcome for each of them. If the command waits, it
    exits with 1 unless all of them have carried out the order.
    """
    replies = order_workers(client, chosen, order, model, wait_seconds=wait_seconds)
    if as_json:
        echo(json.dumps([outcome.model_dump() for outcome in replies]))
    for outcome in replies:
        if not as_json:
            echo(f"{outcome.worker}: {outcome.text}", err=outcome.state != "done")
    if wait_seconds and any(outcome.state != "done" for outcome in replies):
        sys.exit(ExitCode.FAILED)
