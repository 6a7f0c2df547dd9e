"""How commands end that cannot go on: one line on standard error, and an exit code."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

import click

from jobs.errors import ExitCode, RankmillError

MEASURED = "what was measured is kept, and the same command continues"

P = ParamSpec("P")


def clean_exit(interrupted: str = "") -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make every expected failure of a command one line and an exit code.

    SIGTERM ends the command as Ctrl-C does, unless it handles signals itself.

    Parameters
    ----------
    interrupted
        What is left of the command's work when it is interrupted, for that line.
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
                error.args = (f"interrupted; {interrupted}" if interrupted else "interrupted",)
                _fail(error, ExitCode.INTERRUPTED)
            except BrokenPipeError:
                raise  # whoever read the output has seen enough; click ends without a word
            except Exception as error:
                if not isinstance(error, _outside()):
                    raise
                _fail(error, ExitCode.FAILED)

        return run

    return wrap


def _outside() -> tuple[type[Exception], ...]:
    """Failures of server, disk and memory; imported only when there is one."""
    import pyarrow as pa
    import redis

    return (redis.RedisError, OSError, MemoryError, pa.ArrowException)


def _fail(error: BaseException, code: ExitCode) -> NoReturn:
    """End with the error and its notes in one line."""
    from jobs.runtime.passwords import mask_passwords

    reason = str(error) or type(error).__name__
    line = " ".join("; ".join([reason, *getattr(error, "__notes__", [])]).split())
    click.echo(f"{click.get_current_context().command_path}: {mask_passwords(line)}", err=True)
    sys.exit(code)
