"""Reads how safely a Redis server keeps data, and which losses of data its settings allow.

docs/explanation/guarantees.md says what follows from each setting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import redis
from pydantic import BaseModel, ConfigDict, computed_field

from rankmill.jobs.contract.errors import RedisUnavailable
from rankmill.jobs.runtime.patience import each_reply, waiting
from rankmill.jobs.system import system

Concerns = Literal["every run", "only in Redis"]
"""Which data could be lost for good.

- ``every run``: the data of every run.
- ``only in Redis``: only data that no process could submit again (`_ALONE`). Any other run has a live
  producer, which submits the run's data again if the server has lost them.
"""

_ALONE = "detached and submitted runs, batches and API keys"

_CONFIG = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "save", "min-replicas-to-write")

_SECONDS = 2.0

logger = logging.getLogger(__name__)

_said: set[tuple[str, str]] = set()


class Risk(BaseModel):
    """A loss of data that the settings of the Redis server allow.

    ``is_known`` is false if the server does not tell the settings on which the loss depends.
    """

    model_config = ConfigDict(frozen=True)

    name: Literal["eviction", "restart", "sync", "failover"]
    concerns: Concerns
    is_known: bool
    text: str


class Durability(BaseModel):
    """The settings that decide how safely a Redis server keeps data.

    A field is ``None`` if the server does not tell that setting.

    Attributes
    ----------
    maxmemory
        In bytes; 0 for no limit.
    save
        The times of snapshots; empty without snapshots.
    needs_replicas
        Whether the server accepts writes only while a replica follows closely (min-replicas-to-write).
    """

    model_config = ConfigDict(frozen=True)

    maxmemory: int | None = None
    maxmemory_policy: str | None = None
    appendonly: bool | None = None
    appendfsync: str | None = None
    save: str | None = None
    replicas: int | None = None
    needs_replicas: bool | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def risks(self) -> tuple[Risk, ...]:
        """The losses of data that these settings allow, each with a sentence that says how to prevent it."""
        return (*self._eviction(), *self._restart(), *self._sync(), *self._failover())

    def concerning(self, concerns: Concerns) -> tuple[Risk, ...]:
        return tuple(risk for risk in self.risks if risk.concerns in ("every run", concerns))

    def _eviction(self) -> Iterator[Risk]:
        policy = self.maxmemory_policy
        if self.maxmemory == 0 or policy == "noeviction":
            return
        says = "does not say whether it evicts keys" if policy is None else "evicts keys"
        setting = f" (maxmemory-policy {policy})" if policy else ""
        yield Risk(
            name="eviction",
            concerns="every run",
            is_known=policy is not None,
            text=f"Redis {says} when its memory is full{setting}: it may then lose chunks, which are scored "
            f"again, and {_ALONE}; set maxmemory-policy noeviction",
        )

    def _restart(self) -> Iterator[Risk]:
        if self.appendonly:
            return
        is_known = self.appendonly is not None
        says = (
            "has no append-only file (appendonly no): a"
            if is_known
            else ("does not say whether it has an append-only file: without one, a")
        )
        since = " since its last snapshot" if self.save else ""
        text = f"Redis {says} restart may lose {_ALONE}{since}; set appendonly yes"
        yield Risk(name="restart", concerns="only in Redis", is_known=is_known, text=text)

    def _sync(self) -> Iterator[Risk]:
        if self.appendonly and self.appendfsync == "no":
            text = (
                "Redis leaves it to its host when the append-only file is on disk (appendfsync no): a crash "
                f"of the host may lose {_ALONE} of the last half minute; set appendfsync everysec"
            )
            yield Risk(name="sync", concerns="only in Redis", is_known=True, text=text)

    def _failover(self) -> Iterator[Risk]:
        if self.replicas == 0 or self.needs_replicas:
            return
        if self.replicas is None or self.needs_replicas is None:
            says = "does not say whether it has replicas, and whether it takes writes when none follows"
            where = " where there are any"
        else:
            has = "a replica" if self.replicas == 1 else f"{self.replicas} replicas"
            says = f"has {has} and takes writes when none follows (min-replicas-to-write 0)"
            where = ""
        text = f"Redis {says}: a failover may lose {_ALONE}; set min-replicas-to-write 1{where}"
        yield Risk(name="failover", concerns="only in Redis", is_known=self.replicas is not None, text=text)


def read_durability(client: redis.Redis) -> Durability | None:
    """Read the server's durability settings in one round trip, or return ``None`` if it cannot serve now.

    A server may refuse CONFIG or INFO, and managed servers leave fields out.
    """
    try:
        with waiting(most=0, until=system.monotonic() + _SECONDS):
            info, *settings = each_reply(client, [("info",), *(("config_get", name) for name in _CONFIG)])
    except (redis.RedisError, RedisUnavailable, OSError):
        return None
    values: dict[str, str] = {}
    for reply in settings:
        if isinstance(reply, Mapping):
            values |= {_text(name): _text(value) for name, value in reply.items()}
    return _durability(info if isinstance(info, Mapping) else {}, values)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _durability(info: Mapping[str, Any], settings: Mapping[str, str]) -> Durability:
    """Make `Durability` from Redis's INFO and settings. Any entry of both may be missing."""
    replicas = _number(info.get("connected_slaves"))
    needed = _number(settings.get("min-replicas-to-write"))
    # INFO has this field only if the number of replicas and their lag are both set
    if "min_slaves_good_slaves" in info:
        needed = 1
    elif replicas is not None:
        needed = 0
    appendonly = {"0": False, "no": False, "1": True, "yes": True}.get(
        str(info.get("aof_enabled", settings.get("appendonly")))
    )
    return Durability(
        maxmemory=_number(info.get("maxmemory", settings.get("maxmemory"))),
        maxmemory_policy=info.get("maxmemory_policy", settings.get("maxmemory-policy")),
        appendonly=appendonly,
        appendfsync=settings.get("appendfsync"),
        save=settings.get("save"),
        replicas=replicas,
        needs_replicas=None if needed is None else needed > 0,
    )


def _number(value: object) -> int | None:
    return int(text) if (text := str(value)).isdecimal() else None


def warn_of_risks(durability: Durability | None, url: str, concerns: Concerns) -> None:
    """Log the losses of data that a server's settings allow. Each of them is logged only once for a server.

    Parameters
    ----------
    durability
        The server's settings; ``None`` if unknown.
    url
        URL of the server.
    concerns
        The data whose possible losses are logged.
    """
    for risk in durability.concerning(concerns) if durability else ():
        if (url, risk.text) not in _said:
            _said.add((url, risk.text))
            logger.warning("%s (docs/explanation/guarantees.md)", risk.text)
