"""Scripts that move a submitted run from one state to the next: each is one step, whole or not at all.

A runner holds a run by an entry in RQ's registry of started jobs: ``<run>:<claim>``, with the time at which
it expires by the server's clock. Whoever takes this entry away is the only one who may write the record.
"""

from rankmill.jobs.protocol.leases import BOUND

CLAIM = """
local skip, held = {}, {}
for place = 4, #ARGV do skip[ARGV[place]] = true end
for _, entry in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  held[string.match(entry, '^(.*):') or entry] = true
end
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, tonumber(ARGV[3]) - 1)) do
  if held[id] then
    redis.call('LREM', KEYS[1], 1, id)
  elseif not skip[id] then
    redis.call('LREM', KEYS[1], 1, id)
    redis.call('ZADD', KEYS[2], redis.call('TIME')[1] + ARGV[1], id .. ':' .. ARGV[2])
    return id
  end
end
"""
"""KEYS: queue, leases. ARGV: lease (s), claim, jobs to look at, ids that this runner leaves to others.
A run that is held and waits as well was put there twice, as a reply was lost: one runner has it at a time."""

RENEW = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return redis.call('EXISTS', KEYS[2]) == 1 and 'lost' or 'forgotten'
end
redis.call('ZADD', KEYS[1], redis.call('TIME')[1] + ARGV[2], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('EXPIRE', KEYS[4], ARGV[4])
return redis.call('EXISTS', KEYS[3]) == 1 and 'cancelled' or 'held'
"""
"""KEYS: leases, record, cancellation, job. ARGV: entry, lease (s), record, expiry (s)."""

END = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
if ARGV[5] == '1' then
  redis.call('ZADD', KEYS[6], redis.call('TIME')[1], ARGV[4])
  redis.call('EXPIRE', KEYS[6], ARGV[3])
end
return 1
"""
"""KEYS: leases, record, job, cancellation, refusals, webhooks.
ARGV: entry, record, expiry (s), id, 0 or 1."""

HAND_BACK = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
if tonumber(ARGV[6]) > 0 then
  redis.call('ZADD', KEYS[4], redis.call('TIME')[1] + ARGV[6], ARGV[4])
else
  redis.call(ARGV[5], KEYS[3], ARGV[4])
end
return 1
"""
"""KEYS: leases, record, queue, pauses. ARGV: entry, record, expiry (s), id, LPUSH or RPUSH, pause (s)."""

RECOVER = (
    BOUND
    + """
local now = redis.call('TIME')[1]
bound(KEYS[1], now, tonumber(ARGV[4]))
bound(KEYS[3], now, 0)
if ARGV[1] == '1' then
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], 0, now)) do
    redis.call('ZREM', KEYS[1], entry)
    redis.call('LPUSH', KEYS[2], string.match(entry, '^(.*):') or entry)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], 0, now)) do
  redis.call('ZREM', KEYS[3], id)
  redis.call('RPUSH', KEYS[2], id)
end
if redis.call('EXISTS', KEYS[2]) == 1 then return end
local held = {}
for _, entry in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  held[string.match(entry, '^(.*):') or entry] = true
end
local only = redis.call('ZCARD', KEYS[5]) == 1 and redis.call('ZSCORE', KEYS[5], ARGV[2])
local function waits(id)
  local job = redis.call('HMGET', ARGV[3] .. id, 'origin', 'status')
  if job[1] or not only then return job[1] == ARGV[2] and job[2] == 'queued' end
  local read, run = pcall(cjson.decode, redis.call('GET', ARGV[5] .. id) or '')
  return read and (run.state == 'waiting' or run.state == 'running')
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[4], -10000, -1)) do
  if not held[id] and not redis.call('ZSCORE', KEYS[3], id) and waits(id) then
    redis.call('RPUSH', KEYS[2], id)
  end
end
"""
)
"""KEYS: leases, queue, pauses, submitted runs, queues of runners. ARGV: whether to take runs from runners
whose lease has expired, name of the queue, prefix of RQ's jobs, length of the caller's lease (s), prefix of
records. If nothing waits, it also looks for runs that are in no list, as one was lost. An ended run has no
job; a run whose job is lost too is this queue's, if there is no other."""

CANCEL = """
redis.call('SET', KEYS[1], 1, 'EX', ARGV[2])
local found = redis.call('LREM', KEYS[2], 0, ARGV[1]) + redis.call('ZREM', KEYS[3], ARGV[1])
if found == 0 then return 0 end
redis.call('ZADD', KEYS[4], redis.call('TIME')[1] + ARGV[3], ARGV[1] .. ':' .. ARGV[4])
return 1
"""
"""KEYS: cancellation, queue, pauses, leases. ARGV: id, expiry (s), lease (s), claim."""

TAKE_WEBHOOK = """
local now = redis.call('TIME')[1]
local found = redis.call('ZRANGEBYSCORE', KEYS[1], 0, now, 'LIMIT', 0, 1)[1]
if found then redis.call('ZADD', KEYS[1], now + ARGV[1], found) end
return found
"""
"""KEYS: webhooks. ARGV: seconds after which another runner may try, if this one dies."""
