"""Takes submitted runs one after the other, and writes the outcome of each run once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from types import FrameType

from rankmill.extensions.runners.heartbeat import RunnerHeartbeat
from rankmill.extensions.runners.orders import kind_of
from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.extensions.runners.store import FileRunStore, RunLease, names_of
from rankmill.extensions.runners.webhooks import WebhookSender
from rankmill.extensions.runners.work import clear, drop, made, work_on
from rankmill.jobs.contract.errors import (
    ConnectionFailed,
    OutputBusy,
    RankmillError,
    RedisUnavailable,
    RunExpired,
    RunnerError,
    WireError,
)
from rankmill.jobs.protocol.set_aside import DamagedJob
from rankmill.jobs.runtime.http import MANY_PORTS, health, paths, serve
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 0.1

logger = logging.getLogger(__name__)


class Runner:
    """Takes submitted runs until it is told to stop. Use a `Runner` in the main thread, because it handles
    signals.

    Parameters
    ----------
    store
        The queue of submitted runs.
    settings
        Settings for what orders do not say, such as the server and the length of leases.
    """

    def __init__(self, store: FileRunStore, settings: Settings) -> None:
        self.name = f"{socket.gethostname()}-{system.unique_id()[:8]}"
        self._store = store
        self._settings = settings
        self._heartbeat = RunnerHeartbeat(store, self.name, settings, self._interrupt)
        self._webhooks = WebhookSender(store, settings.of(RunnerSettings))
        self._stopping = self._working = False

    def work(self) -> None:
        """Take runs until SIGTERM or SIGINT. The run in progress is then put back, and another runner
        continues it.

        Raises
        ------
        ConfigError
            The runner cannot listen at `metrics_address`.
        RedisUnavailable
            Redis could not serve within the longest time that a command waits for it.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        if (address := self._settings.metrics_address) != "none":
            serve(paths(health(self._store.redis)), "metrics_address", address, ports=MANY_PORTS)
        self._heartbeat.start()
        self._webhooks.start()
        logger.info("runner %s takes runs of queue %r", self.name, self._store.queue.name)
        try:
            with waiting(look=self._check_stop):
                while not self._stopping:
                    claim = self._store.claim(self._settings.lease_seconds)
                    if claim:
                        self._take(claim)
                    else:
                        system.sleep(_LOOK_SECONDS)
        except _Stopped:
            pass
        finally:
            self._webhooks.stop()
            self._heartbeat.stop()

    def _take(self, claim: RunLease) -> None:
        with about(submitted=claim.run.id):
            run = claim.run if claim.run.is_ended else self._begun(claim.run)
            self._heartbeat.hold(replace(claim, run=run))
            if run.is_ended:  # cancelled while it waited to be continued
                self._answer(run)
            elif done := made(run):
                self._finish(done)
            elif self._store.was_cancelled(run.id):
                self._answer(run.end("cancelled"))
            elif run.deaths > self._settings.max_retries:
                why = f"{run.deaths} runners in a row have died of it without scoring a row"
                self._answer(run.end("failed", why))
            else:
                self._run()

    def _begun(self, run: FileRun) -> FileRun:
        """Return the run as begun by this runner. If the run is ``running`` already, its last runner has
        died.
        """
        deaths = run.deaths
        if run.state == "running":
            logger.warning("runner %s died; continuing its run", run.runner)
            deaths = 0 if run.progress.rows > run.begun_rows else deaths + 1
        return run.changed(
            state="running",
            reason="",
            runner=self.name,
            started=run.started or system.now(),
            deaths=deaths,
            begun_rows=run.progress.rows,
        )

    def _run(self) -> None:
        run = self._heartbeat.claim.run
        logger.info("scoring %s", run.order.request.output)
        try:
            try:
                self._working = True
                if self._stopping:  # the signal came just before `_working` was set
                    raise KeyboardInterrupt
                work_on(run, self._settings, self._note)
            finally:
                self._working = False
        except (KeyboardInterrupt, _Left):
            self._leave()
        except OutputBusy as error:
            logger.info("%s", error)
            self._store.leave(run.id, self._settings.heartbeat_seconds)
            self._hand_back(str(error))
        except RunnerError as error:
            self._refuse(str(error))
        except (RedisUnavailable, ConnectionFailed):
            raise  # another runner continues the run when the lease has ended
        except RankmillError as error:
            self._fail(error, "; ".join([str(error), *getattr(error, "__notes__", [])]))
        except Exception as error:
            logger.exception("the run has failed unexpectedly")
            self._fail(error, f"{type(error).__name__}: {error}")
        else:
            self._answer(self._heartbeat.claim.run.end("done"))

    def _fail(self, error: Exception, reason: str) -> None:
        """End the run as failed, for this `reason`. If the run's order is of an extension's kind, such as a
        batch, the extension makes the reason from the error instead.
        """
        run = self._heartbeat.claim.run
        if kind := kind_of(run.order):
            reason = kind.why_failed(error, run.order)
        self._answer(run.end("failed", reason))

    def _finish(self, run: FileRun) -> None:
        """Record the end of a run whose output is already complete.

        The run was left in this state by a runner that was interrupted between moving the output into place
        and recording the end.
        """
        drop(run, self._settings)
        clear(run)
        self._answer(run.end("done"))

    def _note(self, *, now: bool = False, **changes: object) -> None:
        self._heartbeat.note(**changes)
        if now and self._heartbeat.write() != "held":
            raise _Left

    def _answer(self, run: FileRun) -> None:
        """Write the end of the run to Redis, unless another runner has the run now.

        If the run failed or was cancelled, the data that the run's scoring left in Redis are deleted first.
        """
        if run.state != "done":
            drop(run, self._settings)
        claim = replace(self._heartbeat.release(), run=run)
        if not self._store.end(claim):
            logger.warning("another runner has the run; its end is not written here")
            self._clear_done(run)
            return
        if run.state == "done":
            clear(run)  # once more: a runner that was suspended may have made the folder again
        logger.info("the run is %s%s", run.state, f": {run.reason}" if run.reason else "")
        self._webhooks.wake()

    def _leave(self) -> None:
        """Stop working on the run, because it was cancelled or taken over, or because this runner must stop.

        - If another runner has taken over the run, the run continues there.
        - If the output is complete, the run ends as done.
        - If the run was cancelled, it ends as cancelled.
        - Otherwise, the run goes back to the front of the queue.
        """
        run = self._heartbeat.claim.run
        if self._heartbeat.held == "lost":
            self._heartbeat.release()
            logger.warning(
                "another runner has taken over the run, because this one was silent; this one leaves it"
            )
            self._clear_done(run)
        elif done := made(run):
            self._finish(done)
        elif self._heartbeat.held == "cancelled":
            self._answer(run.end("cancelled"))
        else:
            self._hand_back("its runner was stopped", first=True)

    def _refuse(self, reason: str) -> None:
        """Put the run back for other runners. If no live runner can score it, the run fails instead."""
        run = self._heartbeat.claim.run
        logger.warning("this runner cannot score the run: %s", reason)
        said = self._store.refuse(run.id, self.name, reason)
        if set(self._store.runners()) <= said.keys():
            names = "" if run.order.kind else f": {names_of(said)}"
            self._answer(run.end("failed", f"no runner can score it{names}"))
            return
        self._store.leave(run.id)
        self._hand_back(f"not by every runner: {names_of(said)}")

    def _hand_back(self, reason: str, *, first: bool = False) -> None:
        claim = self._heartbeat.release()
        run = claim.run.changed(state="waiting", reason=reason, runner="")
        if not self._store.hand_back(replace(claim, run=run), first=first):
            self._clear_done(run)

    def _clear_done(self, run: FileRun) -> None:
        """Delete the run's folder, if another runner has completed the run. The other runner could not delete
        the folder while this runner worked there.
        """
        with suppress(RunExpired, WireError, DamagedJob):
            if self._store.load(run.id).state == "done":
                clear(run)

    def _interrupt(self) -> None:
        """Interrupt the work on the run in the main thread; called by the heartbeat's thread."""
        os.kill(os.getpid(), signal.SIGUSR1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:
            self._stopping = True
        if not self._working:
            return
        if _is_in_finalizer(frame):  # Python would drop the error: try again soon
            threading.Timer(_AGAIN_SECONDS, self._interrupt).start()
            return
        self._working = False
        raise KeyboardInterrupt

    def _check_stop(self) -> None:
        if self._stopping and not self._working:
            raise _Stopped


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class _Left(Exception):
    """Raised when the runner must stop working on its run."""


class _Stopped(Exception):
    """Raised when a signal stops the runner while it waits for Redis."""
