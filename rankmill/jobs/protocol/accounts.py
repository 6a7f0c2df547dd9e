"""The accounts: what each tenant has used, by day, model and device, for 400 days.

A producer says with each transaction in which it forgets results how much its run has used *so far*. The
server adds what is more than it had been told, so a transaction that is repeated, and a producer that was
killed and continues from its journal, count nothing twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import redis

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.priority import GROUP, group_in, group_of
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.usage import NOTHING, Amounts, Usage
from rankmill.jobs.runtime.patience import each_reply
from rankmill.jobs.system import system

KEPT_DAYS = 400

MOST_ENTRIES = 2000
"""Tenants, models and devices that a day tells apart; what more there are is added up as one."""

_DAY = 86400
_NAMES = 10_000
"""Names of tenants that a producer remembers."""

_LONGEST = 200
"""Characters of a name in the accounts."""

_COUNT = """
local function numbers(text)
  local found = {}
  for each in string.gmatch(text or '', '%d+') do found[#found + 1] = tonumber(each) end
  return found
end

local function count()
  if redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then return {} end
  local clock = redis.call('TIME')
  local epoch, seq = redis.call('HGET', KEYS[3], 'epoch'), tonumber(redis.call('HGET', KEYS[3], 'seq') or 0)
  local known_epoch, known_seq = ARGV[5], tonumber(ARGV[6])
  local forgot, lost, now = known_epoch ~= '' and known_epoch ~= epoch, 0, clock[1] .. '.' .. clock[2]
  if not epoch then
    epoch, lost = now, known_seq  -- nothing is left of what the caller has added to
  elseif known_epoch == epoch and seq < known_seq then
    epoch, lost, forgot = now, known_seq - seq, true
  end
  local day = KEYS[3] .. ':' .. math.floor(tonumber(clock[1]) / 86400)
  for at = 10, #ARGV, 11 do
    local before = redis.call('HGET', KEYS[2], ARGV[at])
    local base, all, more, any = numbers(before), {}, {}, false
    for each = 1, 5 do
      local from = base[each] or (forgot and 0) or tonumber(ARGV[at + 5 + each])
      all[each] = math.max(tonumber(ARGV[at + each]), from)
      more[each] = all[each] - from
      any = any or more[each] > 0
    end
    if any then
      local entry = ARGV[7] .. '|' .. ARGV[at] .. '|' .. ARGV[9]
      local has = redis.call('HGET', day, entry)
      if not has then
        local entries = tonumber(redis.call('HGET', day, 'entries') or 0)
        if entries >= tonumber(ARGV[4]) then
          entry = 'other'
          has = redis.call('HGET', day, entry)
        else
          redis.call('HSET', day, 'entries', entries + 1)
        end
      end
      if ARGV[8] ~= '' and entry ~= 'other' then redis.call('HSET', day, 'name|' .. ARGV[7], ARGV[8]) end
      local sums = numbers(has)
      for each = 1, 5 do more[each] = more[each] + (sums[each] or 0) end
      redis.call('HSET', day, entry, string.format('%.0f %.0f %.0f %.0f %.0f', unpack(more)))
    end
    redis.call('HSET', KEYS[2], ARGV[at], string.format('%.0f %.0f %.0f %.0f %.0f', unpack(all)))
  end
  seq = math.max(seq, known_seq) + 1
  redis.call('HSET', KEYS[3], 'epoch', epoch, 'seq', string.format('%.0f', seq))
  if lost > 0 then
    lost = lost + tonumber(redis.call('HGET', KEYS[3], 'lost') or 0)
    redis.call('HSET', KEYS[3], 'lost', string.format('%.0f', lost), 'lost_at', clock[1])
  end
  redis.call('EXPIRE', day, ARGV[3])
  redis.call('EXPIRE', KEYS[3], ARGV[3])
  redis.call('EXPIRE', KEYS[2], ARGV[2])
  return {string.format('%.0f', seq), epoch}
end

-- Once a script has written, a full server takes all that follows; EXPIRE is a write that needs no memory.
if ARGV[1] == '1' then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
local fine, answer = pcall(count)
if not fine then
  local why = type(answer) == 'table' and answer.err or tostring(answer)
  if not string.find(why, 'WRONGTYPE') then return redis.error_reply(why) end
  answer = {'the accounts in Redis are damaged: ' .. why}  -- they keep no run from its end
end
if ARGV[1] == '1' then
  for at = 1, #KEYS do
    if at ~= 3 then redis.call('UNLINK', KEYS[at]) end
  end
end
return answer
"""
"""KEYS: run, what was counted of it, accounts, then others of the run. ARGV: whether to delete the run with
all these, expiry of the second (s), expiry of the accounts (s), most entries of a day, epoch and number of
the latest report that the caller knows, group, tenant, model; then for each device its name, the amounts
since the run began, and those that the caller knows to be counted. Returns number and epoch of this report;
nothing if neither the run is there nor what was counted of it."""

_LEAVE = """
if redis.call('EXPIRE', KEYS[1], ARGV[1]) == 1 then  -- as above: a full server takes what follows
  redis.pcall('HSET', KEYS[2], 'cancelled', '')
  redis.call('EXPIRE', KEYS[2], ARGV[1])
end
for at = 1, #KEYS do
  if at ~= 2 then redis.call('UNLINK', KEYS[at]) end
end
redis.call('SET', KEYS[3], 1, 'EX', ARGV[1])
"""
"""KEYS: run, what was counted of it, the note that it was cancelled, others of the run; the second stays,
the third is written, all others go. ARGV: expiry of both (s)."""

logger = logging.getLogger(__name__)


@dataclass
class RunUsage:
    """A run's usage since it began, and the part known to be counted."""

    run: Run
    total: Usage = field(default_factory=dict)
    counted: Usage = field(default_factory=dict)

    @property
    def is_new(self) -> bool:
        """Whether there is something to count."""
        return any(self.counted.get(name) != amounts for name, amounts in self.total.items())


class Entry(NamedTuple):
    """A tenant's usage of a model and a device on a day; days are counted from 1970, in UTC.

    What a day does not tell apart has no tenant, model and device, and is ``other``.
    """

    day: int
    group: str
    tenant: str
    model: str
    device: str
    amounts: Amounts
    other: bool = False

    @property
    def date(self) -> str:
        """The day as YYYY-MM-DD."""
        return str(datetime.fromtimestamp(self.day * _DAY, UTC).date())


class Accounts(NamedTuple):
    """Entries of some days; and how many reports of work the server has lost, of those that it had
    acknowledged, as far as a producer has detected, with the time when it last did (s since 1970).
    """

    entries: Sequence[Entry]
    lost: int = 0
    lost_at: float = 0.0


class Accountant:
    """Counts what runs use. One for each client; threads may share it."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._latest = ("", 0)
        self._told = False

    def know(self, tenant: str) -> None:
        """Remember the name of a tenant whose run begins."""
        if tenant:
            self._names[group_of(tenant)] = tenant
            if len(self._names) > _NAMES:
                del self._names[next(iter(self._names))]

    def add(self, pipe: Any, usage: RunUsage, delete: Iterable[str] = (), at: str | None = None) -> None:
        """Add one command to `pipe` that counts what a run has used; it counts nothing if the run has ended.

        It also deletes the run, with these keys, if there are any: only once it is counted. A run that is not
        in Redis is there as long as the key `at`.
        """
        run, others = usage.run, list(delete)
        group = group_of("") if at else group_in(run.id)[-GROUP:]
        places = [at or keys.run(run.id), keys.counted(run.id), keys.usage(), *others]
        about = [int(bool(others)), run.ttl, KEPT_DAYS * _DAY, MOST_ENTRIES, *self._latest]
        whose = [group, self._names.get(group, ""), run.spec.model[:_LONGEST]]
        amounts: list[object] = []
        for device, total in usage.total.items():
            amounts += [_plain(device), *total, *usage.counted.get(device, NOTHING)]
        pipe.eval(_COUNT, len(places), *places, *about, *whose, *amounts)

    def leave(self, pipe: Any, run: Run, delete: Iterable[str]) -> None:
        """Add one command to `pipe` that deletes a run, with these keys, and notes that it was cancelled.

        It leaves what was counted of it: so its producer can still count, once, the results that it has and
        has not told of.
        """
        first = [keys.run(run.id), keys.counted(run.id), keys.cancelled(run.id)]
        places = list(dict.fromkeys([*first, *delete]))
        pipe.eval(_LEAVE, len(places), *places, run.ttl)

    def added(self, reply: Any, usage: RunUsage, total: Usage) -> None:
        """Take note of the reply to `add`, which told a `total`."""
        if len(reply) == 2:
            self._latest = reply[1].decode(), int(reply[0])
            usage.counted = total
        elif reply and not self._told:
            self._told = True
            logger.warning("what runs use is not counted: %s", reply[0].decode(errors="replace"))


def _plain(device: str) -> str:
    return device.replace("|", " ")[:_LONGEST]


def read_accounts(client: redis.Redis, days: int, tenant: str | None = None) -> Accounts:
    """The usage of the last `days`, today included; only that of `tenant`, if given."""
    today = int(system.now() // _DAY)
    wanted = range(today - min(days, KEPT_DAYS) + 1, today + 1)
    named = [keys.usage(), *map(keys.usage, wanted)]
    state, *found = each_reply(client, [("hgetall", name) for name in named])
    known = _texts(state)
    entries = [entry for day, raw in zip(wanted, found, strict=True) for entry in _entries(day, _texts(raw))]
    names = {entry.group: entry.tenant for entry in entries if entry.tenant}
    entries = [entry._replace(tenant=names.get(entry.group, entry.tenant)) for entry in entries]
    if tenant is not None:
        entries = [entry for entry in entries if entry.group == group_of(tenant) and not entry.other]
    return Accounts(entries, int(known.get("lost", 0)), float(known.get("lost_at", 0)))


def _texts(raw: Any) -> dict[str, str]:
    """The fields of a hash; none of a key that is damaged."""
    if not isinstance(raw, dict):
        return {}
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}


def _entries(day: int, fields: dict[str, str]) -> Iterable[Entry]:
    for name, value in fields.items():
        numbers = value.split(" ")
        if len(numbers) != len(NOTHING) or not all(each.isdecimal() for each in numbers):
            continue
        amounts = Amounts(*map(int, numbers))
        if name == "other":
            yield Entry(day, "", "", "", "", amounts, other=True)
        elif name.count("|") >= 2:
            group, device, model = name.split("|", 2)
            yield Entry(day, group, fields.get(f"name|{group}", ""), model, device, amounts)
