-- Puts back runs whose pause is over, and runs whose runner's lease has lapsed. If nothing waits then, the
-- script also puts back runs that are in no list, because the server has lost a list. An ended run has no job.
-- If a run's job is lost too, the run counts as this queue's, unless there are other queues.
-- KEYS: the leases, the queue, the pauses, the submitted runs, the queues of runners. ARGV: 1 if lapsed
-- leases count, else 0; name of the queue, prefix of RQ's jobs, length of the caller's lease (s), prefix of
-- records. Returns nothing.
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
