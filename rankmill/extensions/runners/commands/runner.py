"""``rankmill runner``: score submitted files."""

from __future__ import annotations

from rankmill.cli import options
from rankmill.extensions.runners.runner import Runner
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.extensions.runners.store import open_store
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.durability import read_durability, warn_of_risks
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.stores.roots import Roots, confine


@options.command("runner")
@options.settings(
    "redis_url",
    "file_queue",
    "log_level",
    prefix="runner_",
    logs=True,
    runner_read="the working directory",
    runner_write="the working directory",
)
def runner(settings: Settings) -> None:
    """Score submitted files, one after the other.

    Start any number of runners on hosts that see the files. A runner reads the files, lets live workers score
    the rows, and writes the output, all as rankmill score does; it needs no GPU. If a runner dies, another
    one continues its run within lease_seconds + heartbeat_seconds. After SIGTERM or Ctrl-C, a runner puts its
    run back into the queue at once.

    Everybody who can write to the Redis server can submit names of any files. So a runner reads only below
    the folders and URLs of --read, and writes only below those of --write. It never touches hidden files, and
    replaces only files that runners have made.
    """
    own = settings.of(RunnerSettings)
    confine(Roots(own.runner_read, own.runner_write))
    url = options.server(settings)
    client = connect(url, settings.redis_wait_seconds)
    warn_of_risks(read_durability(client), url, "only in Redis")
    Runner(open_store(client, settings), settings).work()
