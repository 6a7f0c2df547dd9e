"""Calls of rankmill as its users write them, for `make check`: what is wrong is found, what comes is known.

Where mypy found no error, the comment that expects it would be one. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import numpy as np
import numpy.typing as npt

from rankmill import AsyncClient, Client, CrossEncoder, Ranked, RunTimeout, Scores
from rankmill.testing import FakeClient, FakeWorkers

PAIRS = [("q", "p")]


def right(client: Client, model: CrossEncoder, pairs: Iterator[tuple[str, str]]) -> None:
    """What is taken, and what comes."""
    assert_type(client.score(PAIRS, timeout=5), Scores)
    assert_type(client.rank("q", ["p"], top_k=3), list[Ranked])
    client.score(pairs)
    client.score(zip(["q"], ["p"], strict=True))
    client.score([["q", "p"]])
    client.score([{"query": "q", "passage": None}], columns=("query", "passage"))
    client.score(np.array(PAIRS))
    for score in client.submit(PAIRS):
        assert_type(score, float)
    for scores in client.submit(PAIRS, all_labels=True):
        assert_type(scores, list[float])
    assert_type(client.submit(PAIRS).scores(5), Scores)
    assert_type(client.submit(PAIRS).errors, dict[int, str])
    assert_type(model.predict(PAIRS), npt.NDArray[np.float32])
    float(model.predict(("q", "p")))
    float(model.predict(["q", "p"]))
    model.predict(PAIRS, convert_to_tensor=True).cpu()
    assert_type(len(model.predict(PAIRS, convert_to_numpy=False)), int)
    Client("redis://h", model="m", chunk_size="auto", warm=["m"], label=1, revision=None)
    FakeClient(model="m", fake_workers=FakeWorkers(lambda query, passage: 1.0, seconds=0.1))


async def right_in_asyncio(client: AsyncClient) -> None:
    """The same of the asyncio twin."""
    assert_type(await client.score(PAIRS, timeout=5), Scores)
    async for score in await client.submit(PAIRS):
        assert_type(score, float)
    async for scores in await client.submit(PAIRS, all_labels=True):
        assert_type(scores, list[float])


def wrong(client: Client, model: CrossEncoder) -> None:
    """What is found."""
    client.score(["q", "p"])  # type: ignore[arg-type]  # strings
    client.score([("q", "p", "x")])  # type: ignore[arg-type]  # three texts
    client.score("qp")  # type: ignore[arg-type]  # a string
    client.score(7)  # type: ignore[arg-type]  # a number
    client.score({"query": ["q"]})  # type: ignore[arg-type]  # columns
    client.score(PAIRS, modle="m")  # type: ignore[call-arg]  # option
    client.score(PAIRS, precision="fp23")  # type: ignore[arg-type]  # value
    client.submit(["q"])  # type: ignore[arg-type]  # strings
    client.submit(PAIRS, prority="bulk")  # type: ignore[call-overload]  # option
    client.rank("q", ["p"], topk=3)  # type: ignore[call-arg]  # option
    Client("redis://h", modle="m")  # type: ignore[call-arg]  # option
    Client("redis://h", chunk_size="large")  # type: ignore[arg-type]  # value
    Client.embedded(devise="cpu")  # type: ignore[call-arg]  # option
    AsyncClient("redis://h", quue="q")  # type: ignore[call-arg]  # option
    FakeClient(quue="q")  # type: ignore[call-arg]  # option
    for score in client.submit(PAIRS):
        score.upper()  # type: ignore[attr-defined]  # a float
    model.predict([("q", "p", "x")])  # type: ignore[list-item]  # three texts
    model.predict(PAIRS).upper()  # type: ignore[attr-defined]  # an array
    model.predict(7)  # type: ignore[call-overload]  # a number


async def wrong_in_asyncio(client: AsyncClient) -> None:
    """The same of the asyncio twin."""
    await client.score([("q", "p", "x")])  # type: ignore[arg-type]  # three texts
    await client.submit(PAIRS, prority="bulk")  # type: ignore[call-overload]  # option
    async for score in await client.submit(PAIRS):
        score.upper()  # type: ignore[attr-defined]  # a float
    try:
        await client.score(PAIRS)
    except RunTimeout as error:
        print(error.nonsense)  # type: ignore[attr-defined]  # attribute
