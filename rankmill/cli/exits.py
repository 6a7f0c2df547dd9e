"""Makes commands report failure by one line on standard error and an exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

import click

from rankmill.jobs.contract.errors import ExitCode, RankmillError

MEASURED = "the measurements are kept, and the same command continues"

P = ParamSpec("P")


class OneKindOfLine(click.Command):
    """A command that writes all its messages as JSON, even the first, if the environment asks for that."""

    def main(self, *args: Any, **options: Any) -> Any:
        _take_closed_streams()
        if os.environ.get("RANKMILL_LOG_FORMAT") == "json":  # before settings are read
            from rankmill.jobs.runtime.logs import write_json

            write_json()
        return super().main(*args, **options)


def _take_closed_streams() -> None:
    """Open the null device for each standard stream that is closed. Otherwise a file that is opened later
    would get the stream's descriptor, and libraries would write their messages into this file.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            if name == "stderr":
                sys.stderr = os.fdopen(descriptor, "w")


def clean_exit(interrupted: str = "") -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Turn every expected failure of a command into one line and an exit code.

    SIGTERM ends the command as Ctrl-C does, unless the command handles signals itself.

    Parameters
    ----------
    interrupted
        What becomes of the work after Ctrl-C or SIGTERM, such as ``the scores are kept``. The line that
        reports the signal ends with this.
    """

    def wrap(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                command(*args, **kwargs)
            except RankmillError as error:
                _fail(error, error.exit_code)
            except KeyboardInterrupt as error:
                # Python may have to wait for threads now: another Ctrl-C or SIGTERM ends the process, without
                # a traceback.
                for signum in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(signum, signal.SIG_DFL)
                error.args = (f"interrupted; {interrupted}" if interrupted else "interrupted",)
                _fail(error, ExitCode.INTERRUPTED)
            except BrokenPipeError:
                raise  # the reader has closed the pipe, so click exits silently
            except Exception as error:
                if not isinstance(error, _system_errors()):
                    raise
                _fail(error, ExitCode.FAILED)

        return run

    return wrap


def _system_errors() -> tuple[type[Exception], ...]:
    """Return the types of errors that the server, the disk and a lack of memory cause. The packages that
    define these types are imported here, after a failure.
    """
    import pyarrow as pa
    import redis

    return (redis.RedisError, OSError, MemoryError, pa.ArrowException)


def _fail(error: BaseException, code: ExitCode) -> NoReturn:
    from rankmill.jobs.contract.shown import shown
    from rankmill.jobs.runtime.logs import complain
    from rankmill.jobs.runtime.passwords import mask_passwords

    reason = str(error) or type(error).__name__
    line = " ".join("; ".join([reason, *getattr(error, "__notes__", [])]).split())
    complain(shown(f"{click.get_current_context().command_path}: {mask_passwords(line)}"))
    sys.exit(code)
