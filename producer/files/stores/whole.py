"""Files that appear as a whole, on a disk or in a store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from rankmill.jobs.contract.errors import OutputError
from rankmill.producer.files.stores.paths import ObjectPath
from rankmill.producer.files.stores.writing import put, sync


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A file to write on this host, which is moved to `target` if the block ends without an error.

    Raises
    ------
    OutputError
        It cannot be written.
    StoreError
        The store of `target` does not take it.
    """
    beside = None if isinstance(target, ObjectPath) else target.parent
    try:
        # a folder of this process alone: at a name that is known, somebody may have put a link
        with tempfile.TemporaryDirectory(
            dir=beside, prefix=".rankmill-", ignore_cleanup_errors=True
        ) as folder:
            partial = Path(folder) / target.name
            yield partial
            sync(partial)
            put(partial, target)
    except (OSError, pa.ArrowException) as error:
        number = getattr(error, "errno", None)
        raise OutputError(f"cannot write {target}: {os.strerror(number) if number else error}") from None
