"""A runner's heartbeat: renews the lease of its run, and puts back the runs of runners that died."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.protocol.submitted.record import FileRun
from rankmill.jobs.protocol.submitted.store import FileRunStore, LeaseState, RunLease
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.runtime.settings import Settings

logger = logging.getLogger(__name__)


class Heartbeat:
    """Sends heartbeats from a thread.

    Parameters
    ----------
    store, name
        The queue, and the runner's name.
    settings
        Time between two heartbeats, and the length of a lease.
    interrupt
        Called when the runner must leave its run; `held` then says why.
    """

    def __init__(
        self, store: FileRunStore, name: str, settings: Settings, interrupt: Callable[[], None]
    ) -> None:
        self._store = store
        self._name = name
        self._seconds = settings.heartbeat_seconds
        self._lease = settings.lease_seconds
        self._interrupt = interrupt
        self._claim: RunLease | None = None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._last = time.monotonic()
        self._recover_from = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.held: LeaseState = "held"
        """What the last heartbeat learned of the run."""

    def start(self) -> None:
        """Announce the runner and start the thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and withdraw the runner."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=5)
        with suppress(RankmillError), waiting(most=1):
            self._store.withdraw(self._name)

    def hold(self, claim: RunLease) -> None:
        """Renew the lease of a run from now on."""
        with self._lock:
            self._claim, self.held = claim, "held"
        self._wake.set()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def claim(self) -> RunLease:
        """The run as it is now; there must be one."""
        assert self._claim is not None
        return self._claim

    def note(self, **changes: object) -> FileRun:
        """Change the run's record; the next heartbeat writes it."""
        with self._lock:
            self._claim = replace(self.claim, run=self.claim.run.changed(**changes))
            return self._claim.run

    def write(self) -> LeaseState:
        """Write the run's record now, and return whether the runner still holds the run."""
        with self._writing:  # else an older record could be written after a newer one
            claim = self._claim
            if claim is None:  # released meanwhile, by the other thread
                return "held"
            held = self._store.renew(claim, self._lease)
            with self._lock:
                if self._claim and self._claim.entry == claim.entry:
                    self.held = "held" if held == "forgotten" else held
        return self.held

    def release(self) -> RunLease:
        """Renew no lease any more; returns the run as it is."""
        with self._lock:
            claim, self._claim = self.claim, None
        return claim

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._beat()
            except Exception:  # whatever it is, the lease must be renewed
                logger.exception("heartbeat failed, trying again")
            self._wake.wait(self._seconds)
            self._wake.clear()

    def _beat(self) -> None:
        self._store.runners(self._name, self._lease)
        with self._lock:
            claim = self._claim
        if claim and self.write() != "held" and self._claim:
            self._interrupt()
        now = time.monotonic()
        if now - self._last > 2 * self._seconds:  # Redis was away: others must renew their leases first
            self._recover_from = now + self._lease
        self._last = now
        self._store.recover(expired=now >= self._recover_from)
