"""All paths to which texts to score are sent."""

from __future__ import annotations

from rankmill.gateway.dialects import cohere, infinity, jina, shared, tei, vllm, voyage

ROUTES = (
    *shared.ROUTES,
    *tei.ROUTES,
    *cohere.ROUTES,
    *jina.ROUTES,
    *vllm.ROUTES,
    *infinity.ROUTES,
    *voyage.ROUTES,
)
