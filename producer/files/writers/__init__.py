"""Writers of output files as streams of tables, one module for each file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import pyarrow as pa


class Writer(Protocol):
    """Writes one file. Its constructor takes the path and the schema of the tables.

    Raises
    ------
    OSError, pa.ArrowException
        From any method: the file cannot be written.
    """

    def write(self, table: pa.Table) -> None:
        """Append rows."""
        ...

    def close(self, metadata: Mapping[str, str]) -> None:
        """Complete the file, with `metadata` where the format has a place for it."""
        ...

    def abandon(self) -> None:
        """Close the incomplete file."""
        ...
