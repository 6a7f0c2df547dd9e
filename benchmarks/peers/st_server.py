"""Serves a model as people do themselves, by FastAPI around sentence-transformers, at a port.

``python st_server.py MODEL PORT`` answers at ``/rerank``. Each request is scored on its own, in one of the
server's threads.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import CrossEncoder


class Asked(BaseModel):
    """A query and its documents."""

    query: str
    documents: list[str]


def application(model: str) -> FastAPI:
    """The server for a model."""
    app = FastAPI()
    scorer = CrossEncoder(model)

    @app.post("/rerank")
    def rerank(asked: Asked) -> dict[str, list[dict[str, Any]]]:
        pairs = [(asked.query, text) for text in asked.documents]
        scores = scorer.predict(pairs, show_progress_bar=False)
        found = [{"index": place, "relevance_score": float(score)} for place, score in enumerate(scores)]
        return {"results": sorted(found, key=lambda each: -each["relevance_score"])}

    return app


if __name__ == "__main__":
    uvicorn.run(application(sys.argv[1]), port=int(sys.argv[2]), access_log=False, log_level="warning")
