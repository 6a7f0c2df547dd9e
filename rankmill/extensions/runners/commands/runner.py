"""``rankmill runner``: score submitted files."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rankmill.cli import options
from rankmill.extensions.runners.runner import Runner
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.extensions.runners.store import open_store
from rankmill.jobs.runtime.connection import connect
from rankmill.jobs.runtime.durability import read_durability, warn_of_risks
from rankmill.jobs.runtime.logs import set_up
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.files.stores.roots import Roots, confine


class RunnerOptions(options.CommandOptions):
    """Options of runner."""

    read: Annotated[str, Field(title="TEXT")] | None = None
    """Folders and URLs that runs may read from, separated by commas.  [default: the working directory]"""
    write: Annotated[str, Field(title="TEXT")] | None = None
    """Folders and URLs that runs may write to, separated by commas.  [default: the working directory]"""


@options.command("runner")
@options.of(RunnerOptions)
@options.flags("redis_url", "file_queue", "log_level")
def runner(config: str | None, asked: RunnerOptions, **flags: Any) -> None:
    """Score submitted files, one after the other.

    Start any number of runners on hosts that see the files. A runner reads the files, lets live workers score
    the rows, and writes the output, all as rankmill score does; it needs no GPU. If a runner dies, another
    one continues its run within lease_seconds + heartbeat_seconds. After SIGTERM or Ctrl-C, a runner puts its
    run back into the queue at once.

    Everybody who can write to the Redis server can submit names of any files. So a runner reads only below
    the folders and URLs of --read, and writes only below those of --write. It never touches hidden files, and
    replaces only files that runners have made.
    """
    settings = load_settings({**flags, "runner_read": asked.read, "runner_write": asked.write}, config)
    set_up(settings.log_level, settings.log_format)
    own = settings.of(RunnerSettings)
    confine(Roots(own.runner_read, own.runner_write))
    url = options.server(settings)
    client = connect(url, settings.redis_wait_seconds)
    warn_of_risks(read_durability(client), url, "only in Redis")
    Runner(open_store(client, settings), settings).work()
