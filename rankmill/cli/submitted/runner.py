"""``rankmill runner``: score submitted files."""

from __future__ import annotations

from typing import Any

from rankmill.cli import options
from rankmill.jobs.protocol.submitted.store import FileRunStore
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.files.stores.roots import Roots, confine
from rankmill.runner.runner import Runner

_HERE = "the working directory"


@options.command("runner")
@options.settings("redis_url", "file_queue", "log_level", runner_read=_HERE, runner_write=_HERE)
def runner(config: str | None, **flags: Any) -> None:
    """Score submitted files, one after the other.

    Start any number on hosts that see the files. A runner reads the files, gives the pairs to live workers,
    and writes the output as rankmill score does; it needs no GPU. If it dies, another runner continues its
    run within lease_seconds. After SIGTERM or Ctrl-C, its run goes back to the queue at once.

    Whoever can write to the Redis server names the files. So a runner reads and writes only below the folders
    and URLs of --read and --write, and no hidden files; it replaces only files that runners have made.
    """
    settings = load_settings(flags, config)
    set_up(settings.log_level, settings.log_format)
    confine(Roots(settings.runner_read, settings.runner_write))
    client = connect(options.server(settings), settings.redis_wait_seconds)
    Runner(FileRunStore(client, settings.file_queue, settings.file_run_ttl), settings).work()
