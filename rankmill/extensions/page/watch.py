"""The live page among what the exporter serves, for the seam ``rankmill.watch``."""

from __future__ import annotations

from collections.abc import Mapping
from wsgiref.types import WSGIApplication

import redis

from rankmill.cluster.watch import Watch


class PageWatch(Watch):
    """Adds the page at ``/``."""

    def pages(self, client: redis.Redis) -> Mapping[str, WSGIApplication]:
        """The page, its files and its data."""
        from rankmill.extensions.page.dashboard import page_apps  # numpy, which only the exporter needs

        return page_apps(client)


WATCH = PageWatch()
