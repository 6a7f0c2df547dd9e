"""The settings of batches."""

from __future__ import annotations

from pydantic import Field

from rankmill.jobs.runtime.settings import ExtensionSettings


class BatchSettings(ExtensionSettings):
    """The folder for files of batches, the largest size of a file, and the most bytes of a caller's files."""

    gateway_files: str | None = Field(min_length=1)
    gateway_file_mib: int = Field(ge=1)
    gateway_files_gib: float = Field(gt=0)
