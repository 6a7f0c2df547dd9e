"""All paths to which texts to score are sent, and whose form an error has at any path."""

from __future__ import annotations

from rankmill.gateway.dialects import cohere, infinity, jina, shared, tei, vllm, voyage
from rankmill.gateway.dialects.base import Dialect

ROUTES = (
    *shared.ROUTES,
    *tei.ROUTES,
    *cohere.ROUTES,
    *jina.ROUTES,
    *vllm.ROUTES,
    *infinity.ROUTES,
    *voyage.ROUTES,
)

_BY_PATH = {"/info": tei.TEI} | {route.path: route.dialect for route in ROUTES}
_BY_PREFIX = {f"/{form.dialect.name}/": form.dialect for route in ROUTES for form in route.forms}


def dialect_at(path: str) -> Dialect:
    """The dialect of errors at a path, be it there or not: that of the path or of its prefix, else all."""
    prefix = "/".join(path.split("/", 2)[:2]) + "/"
    return _BY_PATH.get(path) or _BY_PREFIX.get(prefix) or shared.SHARED
