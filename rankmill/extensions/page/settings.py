"""The live page's settings."""

from __future__ import annotations

from rankmill.jobs.runtime.settings import ExtensionSettings, HeaderKey


class PageSettings(ExtensionSettings):
    """The key by which a user of the live page may act on jobs, runs and workers."""

    page_admin_key: HeaderKey
