-- Puts back lost jobs of a run: their hashes say that they wait, pause or run, but no list has them.
-- KEYS: see waiting.lua; then the jobs in transit, the paused jobs, the leases. ARGV: the jobs' ids. Returns how
-- many were put back.
local transit, paused, leases = unpack(KEYS, 4, 6)
local under_way = {queued = true, scheduled = true, started = true}
local lost, found = {}, 0
for _, id in ipairs(ARGV) do lost[id] = not redis.call('ZSCORE', paused, id) or nil end
for _, list in ipairs({(where(ARGV[1])), rq, transit}) do
  for first = 0, redis.call('LLEN', list) - 1, 1000 do
    for _, id in ipairs(redis.call('LRANGE', list, first, first + 999)) do lost[id] = nil end
  end
end
for _, entry in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  lost[string.match(entry, '^(.*):') or entry] = nil
end
for _, id in ipairs(ARGV) do
  if lost[id] and under_way[redis.call('HGET', jobs .. id, 'status') or ''] then
    redis.call('HSET', jobs .. id, 'status', 'queued')
    push(id, false)
    found = found + 1
  end
end
if found > 0 then call_workers(ARGV[1]) end
return found
