"""The job function of submitted runs, as RQ knows it by name."""

from __future__ import annotations

from typing import NoReturn

from rankmill.jobs.contract.errors import WrongWorkerError


def score_file(order: object) -> NoReturn:
    """Always fail. RQ calls this function by its name in a worker that is no runner.

    A runner reads the job and scores the files itself, so ``jobs`` does not depend on it.

    Raises
    ------
    WrongWorkerError
        Always.
    """
    raise WrongWorkerError("a plain RQ worker cannot score files; start a runner with: rankmill runner")
