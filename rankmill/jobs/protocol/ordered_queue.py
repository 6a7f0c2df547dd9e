"""RQ's queue with requests before bulk work: one list of job ids, the requests first.

RQ takes jobs from the front of the list, so requests come first. Ids are placed by a script, as other
processes take and place jobs meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.protocol.rq import RQQueue, workers_of
from rankmill.jobs.runtime.patience import each_reply

IDLE_SECONDS = 5
"""How long the list of idle workers has a worker that says nothing more."""

_BELL_SECONDS = 60
_BELL_RINGS = 64
"""Expiry of the bell, and the rings that it keeps, at most, for workers that listen later."""

LOOK_AT = 128
"""Next bulk jobs among which a worker chooses a run, and last jobs among which it looks for requests that RQ
alone has put there."""

_PROBES = 4
"""Jobs by which lost lists are detected: a producer waits for its first ones."""

_PUT_BACK_AT_ONCE = 1000
"""Jobs that one script looks for. It walks through the lists once: 100,000 jobs take tens of milliseconds."""

_REMOVE_AT_ONCE = 512
_FEW = 8
"""Waiting jobs among which one script looks for those of a run, for 3 ms at most; and how many jobs are
removed one by one: the server walks through the whole list for each."""

_SORT = 10_000
"""Waiting jobs, from the first, among which misplaced requests are looked for."""

# The job of a bulk chunk is named <hexadecimal run>-<chunk>; all others are requests' (contract/priority.py).
_COMMON = """
local queue = KEYS[1]
local function is_bulk(id) return string.match(id, '^%x+%-%d+$') end
local last_run, its_jobs
local function run_of(id)  -- nil if it is no bulk run's; jobs of a run are mostly together, which is quick
  if last_run and string.sub(id, 1, #its_jobs) == its_jobs then return last_run end
  last_run = is_bulk(id) and string.match(id, '^%x+')
  its_jobs = last_run and last_run .. '-'
  return last_run or nil
end
local function named(id)  -- the run, or what stands for one, as contract/priority.py has it
  return string.match(id, '^(r?%x+)%-%d+$') or 'r' .. id
end
local function group_of(id)  -- the tenant, likewise
  local run = named(id)
  return (string.sub(run, 1, 1) == 'r' and 'r' or '') .. string.sub(run, -12)
end
local function first_bulk()
  local head = redis.call('LINDEX', queue, 0)
  if not head or is_bulk(head) then return 0 end
  local low, high = 1, redis.call('LLEN', queue)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_bulk(redis.call('LINDEX', queue, middle)) then high = middle else low = middle + 1 end
  end
  return low
end
local function place(id, at_front)
  if not is_bulk(id) and at_front then return redis.call('LPUSH', queue, id) end
  local next_id = redis.call('LINDEX', queue, first_bulk())
  if next_id then redis.call('LINSERT', queue, 'BEFORE', next_id, id) else redis.call('RPUSH', queue, id) end
end
local function ring(bell)
  redis.call('LPUSH', bell, 1)
  redis.call('LTRIM', bell, 0, tonumber(ARGV[1]) - 1)
  redis.call('EXPIRE', bell, ARGV[2])
end
"""

_PLACE = (
    _COMMON
    + """
place(ARGV[3], ARGV[4] == '1')
if not is_bulk(ARGV[3]) then ring(KEYS[2]) end
"""
)

_RESCUE = (
    _COMMON
    + """
local bell, transit, seen, id, now = KEYS[2], KEYS[3], KEYS[4], ARGV[3], tonumber(ARGV[4])
if not redis.call('LPOS', transit, id) then return end  -- its worker has begun it meanwhile
local since = tonumber(redis.call('GET', seen) or '')
if not since then
  -- until long after the sweep that puts it back
  redis.call('SET', seen, ARGV[4], 'EX', math.ceil(4 * tonumber(ARGV[5])))
elseif math.abs(now - since) > tonumber(ARGV[5]) then  -- or the server's clock has jumped back
  redis.call('LREM', transit, 1, id)
  place(id, true)
  if not is_bulk(id) then ring(bell) end
  redis.call('DEL', seen)
end
"""
)

_SORT_REQUESTS = (
    _COMMON
    + """
local bulk, found = nil, 0
for _, id in ipairs(redis.call('LRANGE', queue, 0, tonumber(ARGV[3]) - 1)) do
  if is_bulk(id) then
    bulk = bulk or id
  elseif bulk then
    redis.call('LREM', queue, -1, id)
    redis.call('LINSERT', queue, 'BEFORE', bulk, id)
    ring(KEYS[2])
    found = found + 1
  end
end
return found
"""
)

_TAKE = (
    _COMMON
    + """
local transit, bell, idle, workers = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local kinds, name, may_idle, now = ARGV[1], ARGV[2], ARGV[3] == '1', redis.call('TIME')[1]
local take, rank = {}, {}
for place = 9, #ARGV do rank[ARGV[place]] = place end
-- Which of two jobs is next: none of a run that is left alone, not one of a run that comes after all others,
-- then the tenant that has had the least, then his run that has had the least.
local function before(id, run, best)
  if rank['-' .. run] then return best end
  local its = {rank['!' .. run] and 1 or 0, rank[group_of(id)] or 0, rank[run] or 0, id = id}
  for at = 1, 3 do
    if best and its[at] ~= best[at] then return its[at] < best[at] and its or best end
  end
  return best or its
end
local function is_first(its) return its and its[1] + its[2] + its[3] == 0 end
local function bring_requests()
  local head = redis.call('LINDEX', queue, 0)
  if ARGV[6] == '0' or not head or not is_bulk(head) then return end
  for _, id in ipairs(redis.call('LRANGE', queue, -tonumber(ARGV[5]), -1)) do
    if not is_bulk(id) then
      redis.call('LREM', queue, -1, id)
      redis.call('LINSERT', queue, 'BEFORE', head, id)
    end
  end
end
function take.request()
  bring_requests()
  local best, at, piece = nil, 0, tonumber(ARGV[5])
  repeat  -- look further if all of a piece are left alone
    local requests = 0
    for _, id in ipairs(redis.call('LRANGE', queue, at, at + piece - 1)) do
      if is_bulk(id) then break end
      requests, best = requests + 1, before(id, named(id), best)
      if is_first(best) then break end
    end
    at = at + piece
  until best or requests < piece or at == 8 * piece
  if not best then redis.call('DEL', bell) return nil end
  redis.call('LREM', queue, 1, best.id)
  redis.call('RPUSH', transit, best.id)
  return best.id
end
-- Brings jobs of runs or tenants that have less than their part of the `near` ones there, out of a piece of
-- the list further back. The list's last jobs get their places: the server walks to a job that it removes.
local function bring_bulk(near, has, last, at, runs, groups)
  local start = at + tonumber(ARGV[7])
  local found, lacking, brought = {}, {}, {}
  local function lacks(name, parts)
    local had, part = has[name] or 0, math.floor(#near / (parts + 1))
    if had >= part or not (lacking[name] or had < part / 2) then return false end
    lacking[name] = true
    return true
  end
  for place, id in ipairs(redis.call('LRANGE', queue, start, start + tonumber(ARGV[8]) - 1)) do
    local run = run_of(id)
    local group = run and group_of(id)
    -- A tenant with its part gets no more runs there: they would take the place of the others' jobs.
    local open = run and (groups == 1 or (has[group] or 0) < #near / groups)
    if open and (lacks(run, runs) or lacks(group, groups)) then
      has[run], has[group] = (has[run] or 0) + 1, (has[group] or 0) + 1
      found[#found + 1] = {id = id, run = run, place = start + place - 1}
    end
  end
  for number = #found, 1, -1 do
    local each, filler = found[number], redis.call('LINDEX', queue, -1)
    if not is_bulk(filler) then break end  -- it is looked for at the end of the list
    redis.call('RPOP', queue)
    if filler ~= each.id then redis.call('LSET', queue, each.place, filler) end
    table.insert(brought, 1, each)
  end
  for _, each in ipairs(brought) do
    local before = last[each.run]
    redis.call('LINSERT', queue, before and 'AFTER' or 'BEFORE', before or near[1], each.id)
    last[each.run] = each.id
  end
  return brought
end
function take.bulk()
  local best, has, last, runs, groups = nil, {}, {}, 0, 0
  local at = first_bulk()
  local near = redis.call('LRANGE', queue, at, at + tonumber(ARGV[5]) - 1)
  for _, id in ipairs(near) do
    local run = run_of(id)
    if run then
      best = before(id, run, best)
      if is_first(best) then break end
      local group = group_of(id)
      if not has[run] then runs = runs + 1 end
      if not has[group] then groups = groups + 1 end
      has[run], has[group], last[run] = (has[run] or 0) + 1, (has[group] or 0) + 1, id
    end
  end
  if #near == 0 then return nil end
  if not is_first(best) and ARGV[8] ~= '0' then
    for _, each in ipairs(bring_bulk(near, has, last, at, runs, groups)) do
      best = before(each.id, each.run, best)
    end
  end
  if not best then return nil end
  redis.call('LREM', queue, 1, best.id)
  redis.call('RPUSH', transit, best.id)
  return best.id
end
local found
for kind in string.gmatch(kinds, '%a+') do
  found = found or take[kind]()
end
if may_idle and not found then
  redis.call('ZADD', idle, now + tonumber(ARGV[4]), name)
  redis.call('EXPIRE', idle, ARGV[4])
else
  redis.call('ZREM', idle, name)
end
local waiting = redis.call('LLEN', queue)
return {found or '', waiting, redis.call('SCARD', workers), redis.call('ZCOUNT', idle, now, '+inf')}
"""
)

_PUT_BACK = (
    _COMMON
    + """
local transit, paused, leases, bell = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local under_way = {queued = true, scheduled = true, started = true}
local lost, found = {}, 0
for at = 3, #ARGV do
  if not redis.call('ZSCORE', paused, ARGV[at]) then lost[ARGV[at]] = true end
end
for _, list in ipairs({queue, transit}) do
  for first = 0, redis.call('LLEN', list) - 1, 1000 do
    for _, id in ipairs(redis.call('LRANGE', list, first, first + 999)) do lost[id] = nil end
  end
end
for _, entry in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  lost[string.match(entry, '^(.*):') or entry] = nil
end
for at = 3, #ARGV do
  local id, job = ARGV[at], KEYS[at + 3]
  if lost[id] and under_way[redis.call('HGET', job, 'status') or ''] then
    redis.call('HSET', job, 'status', 'queued')
    if is_bulk(id) then
      redis.call('RPUSH', queue, id)
    else
      place(id, false)
      ring(bell)
    end
    found = found + 1
  end
end
return found
"""
)

# From the list's end, as jobs are taken from its beginning meanwhile.
_REMOVE_PIECE = """
local queue, jobs, left, job, payload = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[5]
local length = redis.call('LLEN', queue)
local last = length - 1 - left
local first = math.max(last - tonumber(ARGV[3]) + 1, 0)
local gone = {}
if last < 0 then return {0, -1} end
for place, id in ipairs(redis.call('LRANGE', queue, first, last)) do
  if string.sub(id, 1, #jobs) == jobs then
    redis.call('LSET', queue, first + place - 1, jobs)
    gone[#gone + 1], gone[#gone + 2] = job .. id, payload .. string.sub(id, #jobs + 1)
  end
end
local found = #gone / 2
if found > 0 then
  redis.call('LREM', queue, last > length / 2 and -found or found, jobs)
  redis.call('UNLINK', unpack(gone))
end
return {found, first == 0 and -1 or left + last - first + 1 - found}
"""

_CLAIM_IDLE = """
if redis.call('LLEN', KEYS[1]) > 0 then return 0 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], 0, '(' .. redis.call('TIME')[1])
return #redis.call('ZPOPMAX', KEYS[2], ARGV[1]) / 2
"""

_BULK = re.compile(rb"[0-9A-Fa-f]+-[0-9]+")


class Taken(NamedTuple):
    """What an attempt to take a job found: its id, if any, and how the queue is now.

    ``waiting`` counts jobs, ``workers`` the workers that are registered, ``idle`` those of them without work.
    """

    job_id: bytes
    waiting: int
    workers: int
    idle: int


class OrderedQueue(RQQueue):
    """RQ's queue, in which every way to put a job keeps requests before bulk work."""

    def place(self, client: Any, job_id: str | bytes, *, at_front: bool) -> None:
        """Put a job's id behind those of its priority, or before them."""
        numbers = [_BELL_RINGS, _BELL_SECONDS]
        if not at_front and is_bulk_job(job_id):
            client.rpush(self.key, job_id)
        else:
            client.eval(_PLACE, 2, self.key, keys.bell(self.name), *numbers, job_id, int(at_front))

    def rescue(self, job_id: bytes, seen: bytes, now: float, seconds: float) -> None:
        """Put a job back that was taken `seconds` ago and is not begun; the key `seen` says since when.

        One that is on its way again soon may be put back too early: who begins it takes it out of the queue.
        """
        client: Any = self.connection
        places = [self.key, keys.bell(self.name), self.intermediate_queue_key, seen]
        client.eval(_RESCUE, 4, *places, _BELL_RINGS, _BELL_SECONDS, job_id, now, seconds)

    def sort(self) -> int:
        """Put requests that RQ alone has put behind bulk work before it; return how many."""
        client: Any = self.connection
        numbers = [_BELL_RINGS, _BELL_SECONDS, _SORT]
        return int(client.eval(_SORT_REQUESTS, 2, self.key, keys.bell(self.name), *numbers))

    def put_back(self, job_ids: Sequence[str]) -> int:
        """Put jobs back that wait, pause or run by their hashes, and are in no list; return how many.

        A list was lost, so no worker would ever find them. All of them are looked for only if one of the
        first few is not found. A job never gets into the queue twice by this; if a worker has it though its
        lease was lost, it may be scored twice.
        """
        if self._has(job_ids[:_PROBES]):
            return 0
        client: Any = self.connection
        places = [self.key, self.intermediate_queue_key, self.scheduled_job_registry.key]
        places += [self.started_job_registry.key, keys.bell(self.name)]
        with client.pipeline(transaction=False) as pipe:
            for first in range(0, len(job_ids), _PUT_BACK_AT_ONCE):
                ids = job_ids[first : first + _PUT_BACK_AT_ONCE]
                jobs = [Job.key_for(job_id) for job_id in ids]
                numbers = [_BELL_RINGS, _BELL_SECONDS]
                pipe.eval(_PUT_BACK, len(places) + len(jobs), *places, *jobs, *numbers, *ids)
            return sum(pipe.execute())

    def _has(self, job_ids: Sequence[str]) -> bool:
        """Whether each of a few jobs is in one of the lists; a job that moves meanwhile may be missed."""
        commands: list[tuple[Any, ...]] = [("zrange", self.started_job_registry.key, 0, -1)]
        for job_id in job_ids:
            commands.append(("lpos", self.key, job_id))
            commands.append(("lpos", self.intermediate_queue_key, job_id))
            commands.append(("zscore", self.scheduled_job_registry.key, job_id))
        leases, *found = each_reply(self.connection, commands)
        if isinstance(leases, Exception):  # or a list of another type, which a person must repair first
            return True
        leased = {entry.rpartition(b":")[0].decode(errors="replace") for entry in leases}
        return all(
            job_id in leased or any(place is not None for place in found[3 * at : 3 * at + 3])
            for at, job_id in enumerate(job_ids)
        )

    def remove_run(self, run_id: str, chunks: Sequence[int]) -> int:
        """Remove the jobs of a run's chunks, with their hashes and payloads; return how many waited.

        Other commands of the server wait for milliseconds only, however many jobs there are.
        """
        client: Any = self.connection
        if len(chunks) <= _FEW:
            waiting = [chunk for chunk in chunks if client.lrem(self.key, 1, keys.job_id(run_id, chunk))]
            for chunk in waiting:
                client.unlink(Job.key_for(keys.job_id(run_id, chunk)), keys.pairs(run_id, chunk))
            return len(waiting)
        names = [keys.job_id(run_id, ""), Job.key_for(""), keys.pairs(run_id, "")]
        removed, found = 0, -1
        while found and removed < len(chunks):  # again, as workers move jobs meanwhile
            found = left = 0
            while left >= 0:
                how = [names[0], left, _REMOVE_AT_ONCE, *names[1:]]
                count, left = client.eval(_REMOVE_PIECE, 1, self.key, *how)
                found += count
            removed += found
        return removed

    def take(
        self,
        kinds: Sequence[Priority],
        order: Sequence[str] = (),
        *,
        worker: str = "",
        idle: bool = False,
        bring: bool = True,
        further: tuple[int, int] = (0, 0),
    ) -> Taken:
        """Move the next job of one of `kinds`, the preferred first, to the intermediate queue, if one waits.

        Parameters
        ----------
        kinds
            Which jobs to take.
        order
            Tenants, by the groups in ids, and ids of bulk runs: who has had the least is named first. Next is
            a job of a tenant that is not named, then of the first one; of a tenant's runs likewise. A run
            with ``!`` before its id comes after all others, and one with ``-`` is left alone.
        worker, idle
            Name of the worker, and whether it will be idle without a job.
        bring
            Whether to bring requests from the end of the queue before bulk work: those that RQ alone has put
            there, but also those that a worker has refused.
        further
            Where to look for bulk runs that have few of the next `LOOK_AT` bulk jobs, and some of whose jobs
            come before them then: after how many bulk jobs, and at how many.
        """
        client: Any = self.connection
        places = [self.key, self.intermediate_queue_key, keys.bell(self.name), keys.idle(self.name)]
        how = [" ".join(kinds), worker, int(idle), IDLE_SECONDS, LOOK_AT, int(bring), *further]
        return Taken(*client.eval(_TAKE, 5, *places, workers_of(self.name), *how, *order))

    def claim_idle(self, most: int) -> int:
        """Forget up to `most` idle workers and return how many; 0 while jobs wait, which they will take."""
        client: Any = self.connection
        return int(client.eval(_CLAIM_IDLE, 2, self.key, keys.idle(self.name), most))


def is_bulk_job(job_id: str | bytes) -> bool:
    """Whether a job is a chunk of a bulk run, as its id says; the scripts above ask the same."""
    text = job_id if isinstance(job_id, bytes) else job_id.encode(errors="replace")
    return _BULK.fullmatch(text) is not None
