"""A server and a worker that the tests of faults may kill."""

from tests.faults.conftest import queue

__all__ = ["queue"]
