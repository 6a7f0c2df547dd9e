"""Names of the Redis keys of gateways and their API keys; each key has an expiry."""

from __future__ import annotations

from rankmill.jobs.contract.keys import PREFIX


def gateway_outcomes(span: int) -> str:
    """Hash: how many requests all gateways together had in a span of time, by outcome."""
    return f"{PREFIX}:gateway-outcomes:{span}"


def api_key(key_id: str) -> str:
    """String: what an API key of the gateway allows, as JSON."""
    return f"{PREFIX}:api-key:{key_id}"


def api_keys() -> str:
    """Sorted set: ids of the API keys, ordered by their expiry (seconds since 1970)."""
    return f"{PREFIX}:api-keys"


def api_key_requests(name: str) -> str:
    """Sorted set: requests in progress, ordered by the end of their leases (seconds since 1970).

    Several API keys can have the same name, and share this set.
    """
    return f"{PREFIX}:api-key-requests:{name}"


def api_key_pairs(name: str) -> str:
    """Hash: the token bucket that all API keys of a name share. `left` is what the last request left in the
    bucket, in parts of a pair: 60,000,000 parts are one pair. `at` is the time of that request (µs since
    1970).
    """
    return f"{PREFIX}:api-key-pairs:{name}"
