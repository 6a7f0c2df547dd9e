"""The live page's settings."""

from __future__ import annotations

from rankmill.jobs.runtime.settings import ExtensionSettings, HeaderKey


class PageSettings(ExtensionSettings):
    """The key of those who may change the cluster from the live page."""

    page_admin_key: HeaderKey
