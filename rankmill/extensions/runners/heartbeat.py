"""Renews a runner's lease of its run, and puts the runs of dead runners back into the queue."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.store import FileRunStore, LeaseState, RunLease
from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.protocol.leases import Renewals, server_time
from rankmill.jobs.runtime.patience import waiting
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import Periodic, system


class RunnerHeartbeat:
    """Sends a runner's heartbeats from a thread. A heartbeat renews the runner's lease of its run, and puts
    the runs of dead runners back into the queue.

    Parameters
    ----------
    store, name
        The submitted runs of the queue, and the runner's name.
    settings
        The settings, with the time between two heartbeats and the length of a lease.
    interrupt
        Called in the thread when the runner must leave its run; `held` then says why.
    """

    def __init__(
        self, store: FileRunStore, name: str, settings: Settings, interrupt: Callable[[], None]
    ) -> None:
        self._store = store
        self._name = name
        self._lease = settings.lease_seconds
        self._interrupt = interrupt
        self._claim: RunLease | None = None
        self._lock = system.Lock()
        self._renewals = Renewals(settings.heartbeat_seconds, settings.lease_seconds)
        self._periodic = Periodic("heartbeat", self._beat, settings.heartbeat_seconds)
        self.held: LeaseState = "held"
        """State of the runner's lease at its last renewal."""

    def start(self) -> None:
        self._beat()
        self._periodic.start()

    def stop(self) -> None:
        self._periodic.stop()
        with suppress(RankmillError), waiting(most=1):
            self._store.withdraw(self._name)

    def hold(self, claim: RunLease) -> None:
        with self._lock:
            self._claim, self.held = claim, "held"
        self._periodic.wake()

    @property
    def claim(self) -> RunLease:
        """The run in progress and its lease, with all changes from `note`. Call this only while there is a
        run in progress.
        """
        assert self._claim is not None
        return self._claim

    def note(self, **changes: object) -> FileRun:
        """Change the record of the runner's run; the next heartbeat writes it to Redis."""
        with self._lock:
            self._claim = replace(self.claim, run=self.claim.run.changed(**changes))
            return self._claim.run

    def write(self) -> LeaseState:
        """Renew the lease, and write the record of the runner's run to Redis. Returns the state of the lease,
        which is ``held`` if there is no run.
        """
        with self._lock:  # so that an older record is never written after a newer one
            if self._claim is None:
                return "held"
            held = self._store.renew(self._claim, self._lease)
            self.held = "held" if held == "forgotten" else held
            return self.held

    def release(self) -> RunLease:
        """Stop renewing the lease of the run in progress; returns the lease and the run."""
        with self._lock:
            claim, self._claim = self.claim, None
        return claim

    def _beat(self) -> None:
        self._store.runners(self._name, self._lease)
        if self.write() != "held" and self._claim:
            self._interrupt()
        self._renewals.renewed(server_time(self._store.redis))
        self._store.recover(self._lease, expired=self._renewals.others_have_lapsed)
