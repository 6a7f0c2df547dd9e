"""What rankmill uses of RQ beyond its public interface is named here, and an RQ that changes it fails.

RQ's parts that only it calls are overridden in `rankmill/workers/rq` and `rankmill/jobs/protocol/rq.py`, and
private names are used there. No other module of the product does either.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rq import Queue, defaults, executions, job_lifecycle, worker_registration
from rq.executions import ExecutionRegistry
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.timeouts import UnixSignalDeathPenalty
from rq.version import VERSION
from rq.worker import SimpleWorker

from rankmill.jobs.protocol import rq as shared
from rankmill.workers import rq as ours

ROOT = Path(__file__).resolve().parents[3] / "rankmill"
PLACES = [ROOT / "workers" / "rq", ROOT / "jobs" / "protocol" / "rq.py"]


class Thing(NamedTuple):
    """Something of RQ: the arguments it is called with, and who in RQ reads, writes or calls it."""

    owner: Any
    name: str
    arguments: str | None = None
    """Names of the arguments; ``None`` if it is a value or a property."""
    users: tuple[str, ...] = ()
    """RQ's own code, as ``module:name``, without whose use of it ours has no effect."""


OVERRIDDEN = (
    Thing(SimpleWorker, "death_penalty_class", users=("worker:BaseWorker.perform_job",)),
    Thing(SimpleWorker, "dequeue_timeout", users=("worker:BaseWorker.connection_timeout",)),
    Thing(
        SimpleWorker,
        "work",
        "burst logging_level date_format log_format max_jobs max_idle_time with_scheduler dequeue_strategy",
    ),
    Thing(SimpleWorker, "request_stop", "signum frame", ("worker:BaseWorker._install_signal_handlers",)),
    Thing(SimpleWorker, "request_force_stop", "signum frame", ("worker:BaseWorker.request_stop",)),
    Thing(SimpleWorker, "_shutdown", "", ("worker:BaseWorker.request_stop",)),
    Thing(SimpleWorker, "get_heartbeat_ttl", "job working_time", ("worker:BaseWorker.maintain_heartbeats",)),
    Thing(
        SimpleWorker,
        "serialize",
        "",
        ("worker:BaseWorker.register_birth", "worker:BaseWorker.maintain_heartbeats"),
    ),
    Thing(SimpleWorker, "register_birth", "", ("worker:BaseWorker.bootstrap",)),
    Thing(SimpleWorker, "register_death", "", ("worker:BaseWorker.teardown",)),
    Thing(SimpleWorker, "unsubscribe", "", ("worker:BaseWorker.teardown",)),
    Thing(
        SimpleWorker,
        "handle_execution_ended",
        "job queue heartbeat_ttl",
        ("worker:BaseWorker._finalize_success", "worker:BaseWorker._finalize_failure"),
    ),
    Thing(Queue, "push_job_id", "job_id pipeline at_front", ("queue:Queue._enqueue_async_job",)),
    Thing(
        Queue,
        "move_dependents_to_ready",
        "job pipeline exclude_job_id refresh_job_status",
        ("worker:BaseWorker.handle_job_success",),
    ),
    Thing(Queue, "schedule_job", "job datetime pipeline unique", ("job:Job.retry",)),
    Thing(Job, "heartbeat", "timestamp ttl pipeline xx", ("worker:BaseWorker.maintain_heartbeats",)),
    Thing(Job, "retry", "queue pipeline"),
    Thing(Job, "perform", "", ("worker:BaseWorker.perform_job",)),
    Thing(
        Job,
        "started_job_registry",
        users=("worker:BaseWorker.maintain_heartbeats", "executions:Execution.create"),
    ),
    Thing(Job, "execution_registry", users=("job:Job.get_executions", "job:Job.delete")),
    Thing(Job, "success_callback", users=("callbacks:execute_success_callback",)),
    Thing(Job, "failure_callback", users=("callbacks:execute_failure_callback",)),
    Thing(Job, "stopped_callback", users=("callbacks:execute_stopped_callback",)),
    Thing(Job, "send_webhooks", "status exc_string", ("worker:BaseWorker.handle_job_failure",)),
    Thing(ExecutionRegistry, "get_executions", "start end", ("executions:ExecutionRegistry.delete",)),
    Thing(
        StartedJobRegistry,
        "add_execution",
        "execution pipeline ttl xx",
        ("executions:Execution.create", "executions:Execution.heartbeat"),
    ),
    Thing(UnixSignalDeathPenalty, "setup_death_penalty", "", ("timeouts:BaseDeathPenalty.__enter__",)),
    Thing(UnixSignalDeathPenalty, "cancel_death_penalty", "", ("timeouts:BaseDeathPenalty.__exit__",)),
)

PRIVATE = (
    Thing(SimpleWorker, "_stop_requested", users=("worker:BaseWorker._shutdown",)),
    Thing(SimpleWorker, "_ordered_queues", users=("worker:BaseWorker.reorder_queues",)),
    Thing(SimpleWorker, "_dequeue_strategy", users=("worker:BaseWorker.reorder_queues",)),
    Thing(SimpleWorker, "_install_signal_handlers", ""),
    Thing(SimpleWorker, "_finalize_success", "job queue execution return_value"),
    Thing(SimpleWorker, "_finalize_failure", "job queue execution exc_info"),
    Thing(Queue, "_enqueue_job", "job pipeline at_front unique", ("queue:Queue.enqueue_many",)),
    Thing(Job, "_unreadable_meta", users=("job:Job.restore",)),
    Thing(Job, "_status", users=("job:Job.get_status", "job:Job.set_status")),
    Thing(UnixSignalDeathPenalty, "_timeout", users=("timeouts:UnixSignalDeathPenalty.setup_death_penalty",)),
    Thing(executions, "WORKER_EXECUTIONS_KEY_TEMPLATE", users=("worker:BaseWorker.executions_key",)),
    Thing(worker_registration, "WORKERS_BY_QUEUE_KEY", users=("worker_registration:register",)),
    Thing(worker_registration, "REDIS_WORKER_KEYS", users=("worker_registration:get_keys",)),
    Thing(worker_registration, "register", "worker pipeline", ("worker:BaseWorker.register_birth",)),
    Thing(defaults, "RQ_KEY_PREFIX", users=("worker:BaseWorker",)),
    Thing(job_lifecycle, "record_job_failure", "job exc_string pipeline"),
)


@pytest.mark.parametrize("thing", [*OVERRIDDEN, *PRIVATE], ids=lambda thing: thing.name)
def test_rq_has_what_rankmill_goes_by(thing: Thing) -> None:
    what = f"{thing.owner.__name__}.{thing.name}"
    said = f"RQ {VERSION} changes {what}, by which rankmill/workers/rq or jobs/protocol/rq.py goes"
    assert hasattr(thing.owner, thing.name) or thing.name in _written_by(thing.owner), f"{said}: it is gone"
    if thing.arguments is not None:
        there = list(inspect.signature(getattr(thing.owner, thing.name)).parameters)
        expected = [*(["self"] if inspect.isclass(thing.owner) else []), *thing.arguments.split()]
        assert there == expected, f"{said}: its arguments are {there}, not {expected}"
    for user in thing.users:
        assert thing.name in _names_in(user), f"{said}: {user} does not use it any more"


@pytest.mark.parametrize("thing", OVERRIDDEN, ids=lambda thing: thing.name)
def test_what_is_overridden_takes_what_rq_s_own_takes(thing: Thing) -> None:
    (mine,) = [each for each in _own_classes() if thing.name in vars(each) and issubclass(each, thing.owner)]
    found = vars(mine)[thing.name]
    if thing.arguments is not None:
        taken = inspect.signature(found)
        taken.bind(None, *thing.arguments.split())  # raises TypeError if it takes fewer


def test_everything_overridden_and_private_is_named_here() -> None:
    overridden = {
        (each.__name__, name)
        for each in _own_classes()
        for name in vars(each)
        if not name.startswith("__") and any(name in vars(base) for base in _rq_bases(each))
    }
    named = {thing.name for thing in OVERRIDDEN}
    assert {each for each in overridden if each[1] not in named} == set()
    private = {name for path in _files(*PLACES) for name in _private_names(path)}
    assert private - {thing.name for thing in (*PRIVATE, *OVERRIDDEN)} == set()


def test_no_other_module_overrides_rq_or_reads_what_is_private_to_it() -> None:
    inside = set(_files(*PLACES))
    for path in set(_files(ROOT)) - inside:
        tree = ast.parse(path.read_text())
        from_rq = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rq"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & from_rq, f"{path}: {node.name} overrides RQ's {bases & from_rq}"
        assert not set(_private_names(path)), f"{path} reads what is private to RQ"


def _files(*places: Path) -> Iterator[Path]:
    for place in places:
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def _own_classes() -> list[type]:
    modules = [shared, *(importlib.import_module(f"{ours.__name__}.{each.name}")
                         for each in pkgutil.iter_modules(ours.__path__))]  # fmt: skip
    classes = {
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    }
    return [each for each in classes if _rq_bases(each)]


def _rq_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] == "rq"]


def _private_names(path: Path) -> Iterator[str]:
    """Names that are private to RQ's classes, where a module uses them of something that has these names."""
    tree = ast.parse(path.read_text())
    inside = path in set(_files(*PLACES))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _private_of_rq() and node.attr not in own:
            owner = node.value
            of_self = isinstance(owner, ast.Name) and owner.id in {"self", "cls"}
            if inside or not of_self:
                yield node.attr


@cache
def _private_of_rq() -> set[str]:
    kinds = (SimpleWorker, Queue, Job, ExecutionRegistry, StartedJobRegistry, UnixSignalDeathPenalty)
    names = {name for kind in kinds for name in (*dir(kind), *_written_by(kind))}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


@cache
def _written_by(kind: Any) -> set[str]:
    """Attributes that the methods of a class and of its bases write."""
    if not inspect.isclass(kind):
        return set()
    trees = [ast.parse(inspect.getsource(base).lstrip()) for base in kind.__mro__ if base is not object]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _names_in(user: str) -> set[str]:
    """Names in the source of a class, a function or a property of RQ; none if it is gone."""
    try:
        found: Any = pkgutil.resolve_name(f"rq.{user}")
    except (ImportError, AttributeError):
        return set()
    code: Any = found.fget if isinstance(found, property) else found
    source = inspect.getsource(code)
    tree = ast.parse(textwrap.dedent(source))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
