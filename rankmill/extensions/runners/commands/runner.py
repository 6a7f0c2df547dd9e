"""``rankmill runner``: score submitted files."""

from __future__ import annotations

from rankmill.cli import options
from rankmill.extensions.runners.runner import Runner
from rankmill.extensions.runners.store import FileRunStore
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.durability import read_durability, warn_of_risks
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.stores.roots import Roots, confine

_HERE = "the working directory"


@options.command("runner")
@options.settings("redis_url", "file_queue", "log_level", logs=True, runner_read=_HERE, runner_write=_HERE)
def runner(settings: Settings) -> None:
    """Score submitted files, one after the other.

    Start any number on hosts that see the files. A runner reads the files, gives the pairs to live workers,
    and writes the output as rankmill score does; it needs no GPU. If it dies, another runner continues its
    run within lease_seconds. After SIGTERM or Ctrl-C, its run goes back to the queue at once.

    Whoever can write to the Redis server names the files. So a runner reads and writes only below the folders
    and URLs of --read and --write, and no hidden files; it replaces only files that runners have made.
    """
    confine(Roots(settings.runner_read, settings.runner_write))
    url = options.server(settings)
    client = connect(url, settings.redis_wait_seconds)
    warn_of_risks(read_durability(client), url, "only in Redis")
    Runner(FileRunStore(client, settings.file_queue, settings.file_run_ttl), settings).work()
