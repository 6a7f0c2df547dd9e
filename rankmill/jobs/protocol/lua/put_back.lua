-- Puts jobs back that wait, pause or run by their hashes, and are in no list.
-- KEYS: the queue, the jobs in transit, the paused jobs, the leases, the bell, the jobs. ARGV: rings, expiry
-- of the bell (s), the jobs' ids. Returns how many it put back.
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
