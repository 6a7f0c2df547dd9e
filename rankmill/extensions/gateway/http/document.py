"""Adds to the OpenAPI document what FastAPI cannot find out: API keys, refusals and request bodies."""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused; the body is in the form of the dialect's errors.",
            "content": {"application/json": {}}},
    "5XX": {"description": "No server or no worker can do it at the moment.",
            "content": {"application/json": {}}},
}  # fmt: skip


_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer KEY"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

_OPEN = ("/health", "/ping", "/ready", "/version")
"""Paths that never need a key."""


def with_keys(document: dict[str, Any]) -> dict[str, Any]:
    """Add the two headers for API keys to the OpenAPI document. Paths in `_OPEN` need no key."""
    document.setdefault("components", {})["securitySchemes"] = _KEYS
    document["security"] = [{name: []} for name in _KEYS]
    for path in _OPEN:
        document["paths"][path]["get"]["security"] = []
    return document


def operation_id(route: APIRoute) -> str:
    """Name a route in the OpenAPI document: ``POST /v1/rerank`` becomes ``post_v1_rerank``."""
    method = "".join(route.methods or ())  # each route has one method
    return f"{method.lower()}{route.path_format.replace('{', '').replace('}', '').replace('/', '_')}"


def json_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Describe, in OpenAPI's form, a request's JSON body that is read as one of the classes `kinds`."""
    schemas = [_without_references(kind.model_json_schema()) for kind in kinds]
    return body("application/json", schemas[0] if len(schemas) == 1 else {"anyOf": schemas})


def body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Describe, in OpenAPI's form, a request's body of the given media type and schema."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def _without_references(schema: dict[str, Any]) -> dict[str, Any]:
    parts = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("$ref")
            return (
                put(parts[name.rpartition("/")[2]])
                if name
                else {key: put(inner) for key, inner in value.items()}
            )
        return [put(inner) for inner in value] if isinstance(value, list) else value

    flat: dict[str, Any] = put(schema)
    return flat
