"""Uploading a file while it is written, so that at its end only the rest of it is left to send."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankmill.producer.files.stores.paths import ObjectPath

_IN_PIECES = {"s3", "s3a"}
"""Stores whose objects are sent in pieces that nobody sees until the object is complete."""

_PIECE_BYTES = 16 << 20
_MOST_PIECES = 1000
"""Pieces of this size; later ones grow, as S3 takes 10,000 of an object."""

logger = logging.getLogger(__name__)


class Upload:
    """Sends a file that grows at its end, in a thread. What fails is only logged: `finish` says so.

    Parameters
    ----------
    file
        The file of this host.
    target
        The object, which appears with `finish`.
    """

    def __init__(self, file: Path, target: ObjectPath) -> None:
        self._file, self._target = file, target
        self._thread = ThreadPoolExecutor(1, "rankmill-upload")
        self._sending: Future[None] | None = None
        self._object: Any = None
        self._sent = 0
        self._failed = target.protocol not in _IN_PIECES

    def follow(self) -> None:
        """Begin to send what the file has, if it is enough for a piece and none is being sent."""
        if not self._failed and (self._sending is None or self._sending.done()):
            self._sending = self._thread.submit(self._send)

    def finish(self) -> bool:
        """Send the rest of the complete file; whether the object is there, as a whole."""
        self._wait()
        if self._object is not None and not self._failed:
            self._sending = self._thread.submit(self._send, to_end=True)
            self._wait()
        if self._object is None or self._failed:
            self.abandon()
            return False
        try:
            self._object.commit()
        except Exception as error:  # each store has errors of its own
            self._fail(error)
            self.abandon()
            return False
        self._object = None
        self._thread.shutdown()
        return True

    def abandon(self) -> None:
        """Let the store forget what was sent."""
        self._failed = True
        self._wait()
        self._thread.shutdown()
        remote, self._object = self._object, None
        if remote is not None:
            with suppress(Exception):  # the store forgets it in time, by its rules for incomplete uploads
                remote.discard()
            remote.closed = True  # else it would be sent when it is collected

    def _wait(self) -> None:
        if self._sending is not None:
            self._sending.result()

    def _send(self, *, to_end: bool = False) -> None:
        try:
            while not self._failed:
                piece = max(_PIECE_BYTES, self._sent // _MOST_PIECES)
                left = self._file.stat().st_size - self._sent
                if left < piece and not (to_end and left):
                    break
                if self._object is None:
                    system, name = self._target.store
                    self._object = system.open(name, "wb", block_size=_PIECE_BYTES, autocommit=False)
                with self._file.open("rb") as file:
                    file.seek(self._sent)
                    self._sent += self._object.write(file.read(min(piece, left)))
            if to_end and not self._failed:
                self._object.flush(force=True)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        logger.info("%s is sent as a whole when it is complete: %s", self._target, error)
