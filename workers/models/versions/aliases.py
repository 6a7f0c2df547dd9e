"""Aliases that reach a worker: in jobs enqueued by name, orders and settings. Runs name versions already."""

from __future__ import annotations

from rankmill.jobs.contract.errors import RankmillError, WorkerError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.registry.resolver import Resolver


class Aliases:
    """Finds the versions that aliases of a registry (its URL, or ``None``) stand for."""

    def __init__(self, registry: str | None) -> None:
        self._resolver = Resolver(registry)

    def pinned(self, spec: ScoreSpec) -> ScoreSpec:
        """`spec` with the version that its model stands for now.

        Raises
        ------
        WorkerError
            This worker cannot find out: its registry is away, or has no such alias.
        """
        try:
            return self._resolver.pinned(spec)
        except RankmillError as error:
            raise WorkerError(str(error)) from error
