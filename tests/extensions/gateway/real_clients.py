"""Real clients of other rerank services, which ask a running gateway: ``python real_clients.py URL``.

It runs in an environment of its own (``make clients``) and imports nothing of ours. A line for each client:
its name, and what it says is the place of the best text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

QUERY = "how far is the moon"
TEXTS = ["Cheese.", "About 384,400 km."]


def cohere_v1(url: str) -> Any:
    import cohere

    client = cohere.Client(api_key="none", base_url=url)
    return client.rerank(query=QUERY, documents=TEXTS, model="demo").results[0].index


def cohere_v2(url: str) -> Any:
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url)
    return client.rerank(query=QUERY, documents=TEXTS, model="demo", top_n=1).results[0].index


def langchain_cohere(url: str) -> Any:
    from langchain_cohere import CohereRerank

    ranker = CohereRerank(cohere_api_key="none", base_url=url, model="demo")
    return ranker.rerank(TEXTS, QUERY)[0]["index"]


def llama_index(url: str) -> Any:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    ranker = TextEmbeddingInference(base_url=url, auth_token="none", top_n=2)
    best = ranker.postprocess_nodes(nodes, query_str=QUERY)[0]
    return TEXTS.index(best.node.get_content())


def haystack(url: str) -> Any:
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
    from haystack import Document
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    ranker = HuggingFaceTEIRanker(url=url)
    found = ranker.run(query=QUERY, documents=[Document(content=text) for text in TEXTS])
    return TEXTS.index(found["documents"][0].content)


def tei_client(url: str) -> Any:
    from tei_client import HttpClient

    return HttpClient(url).rerank(QUERY, TEXTS).ranks[0].index


def voyage(url: str) -> Any:
    import voyageai

    client = voyageai.Client(api_key="none", base_url=f"{url}/v1")
    return client.rerank(QUERY, TEXTS, model="demo").results[0].index


def infinity(url: str) -> Any:
    from infinity_client import Client
    from infinity_client.api.default import rerank
    from infinity_client.models import RerankInput

    body = RerankInput(query=QUERY, documents=TEXTS)
    found = rerank.sync(client=Client(base_url=url), body=body)
    assert found is not None
    return found.results[0].index


def cohere_by_prefix(url: str) -> Any:
    import cohere

    base = f"{url}/cohere"
    first = cohere.Client(api_key="none", base_url=base)
    assert "rerank" in first.models.list().models[0].endpoints
    assert first.models.get("demo").name == "demo"
    found: Any = first.rerank(query=QUERY, documents=[{"text": text} for text in TEXTS], model="demo")
    second = cohere.ClientV2(api_key="none", base_url=base)
    limited: Any = second.rerank(query=QUERY, documents=TEXTS, model="demo", max_tokens_per_doc=3)
    assert limited.meta.tokens.input_tokens < found.meta.tokens.input_tokens
    assert limited.meta.billed_units.search_units == 1
    return found.results[0].index


def langchain_cohere_by_prefix(url: str) -> Any:
    return langchain_cohere(f"{url}/cohere")


def llama_index_by_prefix(url: str) -> Any:
    return llama_index(f"{url}/tei")


def tei_client_by_prefix(url: str) -> Any:
    from tei_client import HttpClient

    client = HttpClient(f"{url}/tei")
    assert client.info().server_model_id == "demo"
    return client.rerank(QUERY, TEXTS, truncate=True).ranks[0].index


def voyage_by_prefix(url: str) -> Any:
    import voyageai

    client = voyageai.Client(api_key="none", base_url=f"{url}/voyage/v1")
    long = [TEXTS[0] * 500, TEXTS[1]]
    assert client.rerank(QUERY, long, model="demo", truncation=True).total_tokens > 500
    refused = _refusal(lambda: client.rerank(QUERY, long, model="demo", truncation=False))
    assert refused.startswith("InvalidRequestError: ")
    assert "512 are taken" in refused
    return client.rerank(QUERY, TEXTS, model="demo").results[0].index


def infinity_by_prefix(url: str) -> Any:
    from infinity_client import Client
    from infinity_client.api.default import health, models

    client = Client(base_url=f"{url}/infinity")
    assert health.sync_detailed(client=client).status_code == 200
    assert models.sync(client=client).data[0].id == "demo"
    return infinity(f"{url}/infinity")


def openai_by_prefix(url: str) -> Any:
    """vLLM's own examples use this client for what OpenAI has, and plain requests for the rest."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/vllm/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == client.models.retrieve("demo").id == "demo"
    body = {"model": "demo", "query": QUERY, "documents": TEXTS}
    long = {**body, "documents": [TEXTS[0] * 500]}
    refused = _refusal(lambda: client.post("/rerank", body=long, cast_to=object))
    assert refused.startswith("BadRequestError: ")
    found: Any = client.post("/rerank", body=body, cast_to=object)
    return found["results"][0]["index"]


def _refusal(ask: Callable[[], Any]) -> str:
    """How a client words that it was refused."""
    try:
        return f"answered {ask()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def litellm_cohere(url: str) -> Any:
    return _litellm("cohere/demo", f"{url}/v1/rerank")


def litellm_jina(url: str) -> Any:
    return _litellm("jina_ai/demo", f"{url}/jina/v1/rerank")


def litellm_infinity(url: str) -> Any:
    return _litellm("infinity/demo", f"{url}/infinity")


def litellm_voyage(url: str) -> Any:
    return _litellm("voyage/demo", f"{url}/voyage/v1/rerank")


def litellm_vllm(url: str) -> Any:
    return _litellm("hosted_vllm/demo", f"{url}/vllm")


def _litellm(model: str, base: str) -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks for one elsewhere
    import litellm

    found = litellm.rerank(model=model, query=QUERY, documents=TEXTS, api_base=base, api_key="none")
    return found.results[0]["index"]


CLIENTS: tuple[Callable[[str], Any], ...] = (
    cohere_v1,
    cohere_v2,
    langchain_cohere,
    llama_index,
    haystack,
    tei_client,
    voyage,
    infinity,
    cohere_by_prefix,
    langchain_cohere_by_prefix,
    llama_index_by_prefix,
    tei_client_by_prefix,
    voyage_by_prefix,
    infinity_by_prefix,
    openai_by_prefix,
    litellm_cohere,
    litellm_jina,
    litellm_infinity,
    litellm_voyage,
    litellm_vllm,
)

if __name__ == "__main__":
    for client in CLIENTS:
        try:
            best = client(sys.argv[1])
        except Exception as error:  # the next client is asked as well
            best = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(client.__name__, best, flush=True)
