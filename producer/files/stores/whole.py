"""Files that appear as a whole, on a disk or in a store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa

from jobs.errors import OutputError
from producer.files.stores.paths import ObjectPath
from producer.files.stores.writing import put, sync


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
    with ExitStack() as stack:
        folder = target.parent
        if isinstance(target, ObjectPath):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankmill-")))
        partial = folder / f".{target.name}.partial"
        try:
            yield partial
            sync(partial)
            put(partial, target)
        except (OSError, pa.ArrowException) as error:
            number = getattr(error, "errno", None)
            raise OutputError(f"cannot write {target}: {os.strerror(number) if number else error}") from None
        finally:
            partial.unlink(missing_ok=True)
