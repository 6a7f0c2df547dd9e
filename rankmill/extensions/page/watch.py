"""Adds the live page to the exporter; an entry point of ``rankmill.watch`` points here."""

from __future__ import annotations

from collections.abc import Mapping
from wsgiref.types import WSGIApplication

import redis

from rankmill.cluster.watch import Watch
from rankmill.extensions.page.settings import PageSettings
from rankmill.jobs.runtime.settings import Settings


class PageWatch(Watch):
    """Adds the live page to the exporter, at the path ``/``."""

    def pages(self, client: redis.Redis, settings: Settings) -> Mapping[str, WSGIApplication]:
        # imported here, because these modules need numpy, and only the exporter calls this method
        from rankmill.extensions.page.actions import admin_apps
        from rankmill.extensions.page.dashboard import page_apps

        key = settings.of(PageSettings).page_admin_key
        return page_apps(client, has_admin=bool(key)) | (admin_apps(client, settings, key) if key else {})


WATCH = PageWatch()
