"""API keys: made and revoked by commands, known by their text, and held to their limits by all gateways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import pytest
import redis
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.cli.main import rankmill
from rankmill.extensions.gateway.keys.admission import Admission, KeysNeeded, key_text
from rankmill.extensions.gateway.keys.api_keys import ApiKey, KeyStore
from rankmill.extensions.gateway.keys.limits import Limits
from rankmill.extensions.gateway.refusals import Kind, Refusal
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.producer.client.aio.connection import LoopRedis
from tests.conftest import Server, serve, wait_for


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    with contextmanager(serve)() as server:
        yield server


@pytest.fixture
def redis_server(own_server: Server) -> Server:
    own_server.client.flushall()
    return own_server


@pytest.fixture
def store(redis_server: Server) -> KeyStore:
    return KeyStore(redis_server.client)


def command(server: Server, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(rankmill, ["keys", *words, "--redis", server.url])
    assert done.exit_code == code, done.output
    return done.output.strip()


def everything_in(client: redis.Redis) -> str:
    return "".join(f"{key!r} {client.dump(key)!r}" for key in client.scan_iter())


def test_a_key_is_shown_once_and_works_until_it_is_revoked(redis_server: Server, store: KeyStore) -> None:
    assert command(redis_server, "list") == "No keys."
    text = command(redis_server, "create", "shop", "--model", "reranker", "--pairs-per-minute", "500")
    other = json.loads(command(redis_server, "create", "shop", "--json"))
    found = store.find(text)
    assert found
    assert (found.name, found.models, found.pairs_per_minute) == ("shop", ("reranker",), 500)
    assert (found.may_use("reranker@production"), found.may_use("rerankers")) == (True, False)
    assert store.find(text[:-1] + ("0" if text[-1] != "0" else "1")) is None
    secret = text.rpartition("_")[2]
    listed = command(redis_server, "list") + command(redis_server, "list", "--json")
    for shown in (everything_in(redis_server.client), listed, mask_passwords(f"what is {text}?")):
        assert secret not in shown
    assert "shop: models reranker, 500 pairs a minute, expires in 365 d" in listed
    assert found.digest not in listed
    assert found.id in command(redis_server, "revoke", found.id)
    assert store.find(text) is None
    assert store.find(other["key"])
    command(redis_server, "revoke", "shop")
    assert store.find(other["key"]) is None
    assert "no API key with id or name shop" in command(redis_server, "revoke", "shop", code=2)
    assert not list(redis_server.client.scan_iter())


def test_every_key_expires(store: KeyStore) -> None:
    text, _ = store.create("brief", days=1 / 86400)
    kept, _ = store.create("kept", days=1)
    client = store.redis
    assert all(client.ttl(key) != -1 for key in client.scan_iter())
    wait_for(lambda: store.find(text) is None)
    assert [key.name for key in store.all()] == ["kept"]
    assert store.find(kept)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "é"])
def test_names_are_plain(store: KeyStore, name: str) -> None:
    with pytest.raises(ConfigError, match="name: "):
        store.create(name, days=1)


def test_a_damaged_key_lets_nobody_in_and_can_be_revoked(redis_server: Server, store: KeyStore) -> None:
    _, key = store.create("shop", days=1)
    store.create("other", days=1)
    store.redis.set(f"rankmill:api-key:{key.id}", b'{"id": 1}')
    assert [each.name for each in store.all()] == ["other"]
    assert key.id in command(redis_server, "revoke", key.id)


@contextmanager
def refused(kind: Kind, text: str) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    with pytest.raises(Refusal, match=text) as found:
        yield found
    assert found.value.kind == kind


def test_pairs_of_all_gateways_count_together(store: KeyStore) -> None:
    _, key = store.create("shop", days=1, pairs_per_minute=100)
    first, second = (Limits(store.redis, 5) for _ in range(2))
    first.take_pairs(key, 60)
    second.take_pairs(key, 40)
    with refused("busy", "100 pairs a minute") as told:
        first.take_pairs(key, 50)
    assert 25 <= (told.value.retry_after or 0) <= 30
    with refused("too_large", "send it in parts"):
        first.take_pairs(key, 101)
    _, free = store.create("free", days=1)
    first.take_pairs(free, 10**9)
    assert all(store.redis.ttl(name) > 0 for name in store.redis.scan_iter())


def age(store: KeyStore, name: str, seconds: float) -> None:
    """Let time go by for the bucket of a key's name."""
    store.redis.hincrby(f"rankmill:api-key-pairs:{name}", "at", -round(seconds * 1e6))


def test_what_is_not_more_than_the_limit_is_never_refused(store: KeyStore) -> None:
    """The minutes of the limit are not those of a clock."""
    _, key = store.create("shop", days=1, pairs_per_minute=100)
    limits = Limits(store.redis, 5)
    for pairs, seconds in [(99, 61)] * 5 + [(10, 6)] * 30 + [(100, 60)] * 3 + [(1, 0.6)] * 200:
        limits.take_pairs(key, pairs)
        age(store, "shop", seconds)
    limits.take_pairs(key, 100)
    with refused("busy", "try again in (29|30) s"):
        limits.take_pairs(key, 50)


def test_a_bucket_outlives_changes_of_the_clock_and_of_the_limit(store: KeyStore) -> None:
    limits = Limits(store.redis, 5)
    _, key = store.create("shop", days=1, pairs_per_minute=100)
    limits.take_pairs(key, 50)
    age(store, "shop", -3600)  # the server's clock went back
    limits.take_pairs(key, 50)
    age(store, "shop", 30)
    limits.take_pairs(key, 50)
    _, less = store.create("shop", days=1, pairs_per_minute=10)
    with refused("busy", "in [1-6] s"):
        limits.take_pairs(less, 1)
    age(store, "shop", 3600)
    limits.take_pairs(less, 10)


@settings(deadline=None)
@given(limit=st.integers(1, 2**31 - 1), first=st.floats(0, 1), then=st.floats(0, 1))
def test_what_is_tried_again_when_it_is_told_is_let_in(
    own_server: Server, limit: int, first: float, then: float
) -> None:
    store = KeyStore(own_server.client)
    store.redis.delete("rankmill:api-key-pairs:shop")
    _, key = store.create("shop", days=1, pairs_per_minute=limit)
    limits = Limits(store.redis, 5)
    had, wanted = round(first * limit), round(then * limit)
    limits.take_pairs(key, had)
    seconds = 0.0
    try:
        limits.take_pairs(key, wanted)
    except Refusal as refusal:
        seconds = refusal.retry_after or 0
        age(store, "shop", seconds)
        limits.take_pairs(key, wanted)
    assert seconds <= max(60 * (had + wanted - limit) / limit, 0) + 1


def test_requests_at_once_are_those_of_live_gateways(store: KeyStore) -> None:
    alive, dies = (Limits(store.redis, 60) for _ in range(2))
    alive.begin("shop", "held", 2)
    dies.begin("shop", "died", 2)

    def is_refused() -> bool:
        for request in store.redis.zrange("rankmill:api-key-requests:shop", 0, -1):
            store.redis.zincrby("rankmill:api-key-requests:shop", -40, request)  # 40 s go by
        alive.renew()
        try:
            alive.begin("shop", "next", 2)
        except Refusal:
            return True
        alive.end("shop", "next")
        return False

    assert is_refused()
    assert not is_refused()  # the lease of the gateway that died is over
    alive.begin("shop", "other", 2)
    assert all(is_refused() for _ in range(5))
    alive.end("shop", "held")
    assert not is_refused()
    alive.end("shop", "other")
    assert not store.redis.exists("rankmill:api-key-requests:shop")


def admission(server: Server, needed: KeysNeeded) -> Admission:
    return Admission(LoopRedis(server.url, 5), lease_seconds=3, needed=needed)


def test_a_key_is_demanded_where_it_must_be(redis_server: Server, store: KeyStore) -> None:
    async def known(needed: KeysNeeded, text: str | None) -> ApiKey | None:
        return await admission(redis_server, needed).identify(text)

    for text in (None, "a-client's-own"):
        assert asyncio.run(known("if there are any", text)) is None
        assert asyncio.run(known("never", text)) is None
    with refused("no_key", "x-api-key"):
        asyncio.run(known("always", None))
    text, key = store.create("shop", days=1)
    for needed in get_args(KeysNeeded):
        assert asyncio.run(known(needed, text)) == key
    with refused("no_key", "unknown, revoked or expired"):
        asyncio.run(known("if there are any", "a-client's-own"))


def test_a_request_counts_until_it_ends_however_it_ends(redis_server: Server, store: KeyStore) -> None:
    _, key = store.create("shop", days=1, requests_at_once=1, pairs_per_minute=10, models=("demo",))

    async def requests() -> None:
        gate = admission(redis_server, "always")

        async def begin(pairs: int = 1, model: str = "demo") -> None:
            async with gate.admitted(key):
                await gate.take(key, (model,), pairs)
                await asyncio.sleep(60)

        with refused("forbidden", "may not use the model 'big'"):
            await begin(model="big")
        with refused("too_large", "send it in parts"):
            await begin(11)
        first = asyncio.create_task(begin())
        while not redis_server.client.exists("rankmill:api-key-requests:shop"):
            await asyncio.sleep(0.01)
        with refused("busy", "1 requests at once"):
            await begin()
        first.cancel()
        await asyncio.wait([first])
        async with gate.admitted(key):
            await gate.take(key, ("demo@production",), 1)

    asyncio.run(requests())
    assert not redis_server.client.exists("rankmill:api-key-requests:shop")


def test_a_request_that_ends_while_it_is_counted_counts_no_more(
    redis_server: Server, store: KeyStore
) -> None:
    _, key = store.create("shop", days=1, requests_at_once=1)

    async def requests() -> None:
        gate = admission(redis_server, "always")

        async def begin() -> None:
            async with gate.admitted(key):
                pass

        await begin()
        redis_server.client.client_pause(60_000, all=False)
        gone = asyncio.create_task(begin())
        while not any("b" in each["flags"] for each in redis_server.client.client_list()):
            await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0)
        redis_server.client.client_unpause()
        await asyncio.wait([gone])
        assert gone.cancelled()
        await begin()

    asyncio.run(requests())


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({}, None),
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer  abc "}, "abc"),
        ({"authorization": "abc"}, "abc"),
        ({"authorization": "Bearer "}, None),
        ({"x-api-key": "abc", "authorization": "Bearer else"}, "abc"),
    ],
)
def test_the_key_in_the_headers(headers: dict[str, str], text: str | None) -> None:
    assert key_text(headers) == text
