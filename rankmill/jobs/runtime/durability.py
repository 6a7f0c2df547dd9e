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

RiskName = Literal["eviction", "restart", "sync", "failover"]

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

    ``is_known`` is false if the server does not tell the settings that decide whether the loss can happen.
    """

    model_config = ConfigDict(frozen=True)

    name: RiskName
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
        return tuple(
            Risk(
                name=name,
                concerns="every run" if name == "eviction" else "only in Redis",
                is_known=is_known,
                text=f"Redis {text}",
            )
            for name, is_known, text in self._risks()
        )

    def _risks(self) -> Iterator[tuple[RiskName, bool, str]]:
        """Yield each risk: its name, whether it is known, and a sentence that lacks its subject, "Redis"."""
        policy = self.maxmemory_policy
        if self.maxmemory != 0 and policy != "noeviction":
            says = f"evicts keys when its memory is full (maxmemory-policy {policy})"
            if policy is None:
                says = "does not say whether it evicts keys when its memory is full"
            lost = f"chunks, which are scored again, and {_ALONE}"
            text = f"{says}: it may then lose {lost}; set maxmemory-policy noeviction"
            yield "eviction", policy is not None, text
        if not self.appendonly:
            says = "has no append-only file (appendonly no): a"
            if self.appendonly is None:
                says = "does not say whether it has an append-only file: without one, a"
            since = " since its last snapshot" if self.save else ""
            text = f"{says} restart may lose {_ALONE}{since}; set appendonly yes"
            yield "restart", self.appendonly is not None, text
        elif self.appendfsync == "no":
            says = "leaves it to its host when the append-only file is on disk (appendfsync no): a crash"
            text = f"{says} of the host may lose {_ALONE} of the last half minute; set appendfsync everysec"
            yield "sync", True, text
        if self.replicas != 0 and not self.needs_replicas:
            has = "a replica" if self.replicas == 1 else f"{self.replicas} replicas"
            says, where = f"has {has} and takes writes when none follows (min-replicas-to-write 0)", ""
            if self.replicas is None:
                says = "does not say whether it has replicas, and whether it takes writes when none follows"
                where = " where there are any"
            text = f"{says}: a failover may lose {_ALONE}; set min-replicas-to-write 1{where}"
            yield "failover", self.replicas is not None, text


def read_durability(client: redis.Redis) -> Durability | None:
    """Read the server's durability settings in one round trip, or return ``None`` if it cannot serve now.

    A server may refuse CONFIG or INFO, and managed servers leave fields out.
    """
    try:
        with waiting(most=0, until=system.monotonic() + _SECONDS):
            info, *settings = each_reply(client, [("info",), *(("config_get", name) for name in _CONFIG)])
    except (redis.RedisError, RedisUnavailable, OSError):
        return None
    told: dict[str, Any] = {}
    for reply in (*settings, info):
        if isinstance(reply, Mapping):
            told |= {_text(name): _text(value) for name, value in reply.items()}
    replicas = _number(told.get("connected_slaves"))
    needed = _number(told.get("min-replicas-to-write")) if replicas is None else 0
    if "min_slaves_good_slaves" in told:  # INFO has it only if the number of replicas and their lag are set
        needed = 1
    appendonly = told.get("aof_enabled", told.get("appendonly"))
    return Durability(
        maxmemory=_number(told.get("maxmemory")),
        maxmemory_policy=told.get("maxmemory_policy", told.get("maxmemory-policy")),
        appendonly={"0": False, "no": False, "1": True, "yes": True}.get(str(appendonly)),
        appendfsync=told.get("appendfsync"),
        save=told.get("save"),
        replicas=replicas,
        needs_replicas=None if needed is None else needed > 0,
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _number(value: object) -> int | None:
    return int(text) if (text := str(value)).isdecimal() else None


def warn_of_risks(durability: Durability | None, url: str, concerns: Concerns) -> None:
    """Log the losses of data that a server's settings allow. For each server, a kind of loss is logged only
    once.

    Parameters
    ----------
    durability
        The server's settings; ``None`` if unknown.
    url
        URL of the server.
    concerns
        The data whose possible losses are logged.
    """
    for risk in durability.risks if durability else ():
        if risk.concerns in ("every run", concerns) and (url, risk.text) not in _said:
            _said.add((url, risk.text))
            logger.warning("%s (docs/explanation/guarantees.md)", risk.text)
