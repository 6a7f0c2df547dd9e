"""All paths to which texts to score are sent."""

from __future__ import annotations

from rankmill.gateway.dialects import tei
from rankmill.gateway.dialects.base import Form, Route

ROUTES = (
    Route("/rerank", "Order texts by their score with a query", (Form(tei.TEI, tei.Rerank),)),
    *tei.ROUTES,
)
