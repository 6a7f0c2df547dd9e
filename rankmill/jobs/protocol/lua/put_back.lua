-- Puts back lost jobs of a run: their hashes say that they wait, pause or run, but no list has them. Also adds the run to
-- the sorted sets of tenants and runs (`turns:<scope>`), in case the server has lost its entry.
-- KEYS: see waiting.lua; then the jobs in transit, the paused jobs, the leases. ARGV: the jobs' ids. Returns how many
-- jobs were put back, and how many jobs were in no list.
local transit, paused, leases = unpack(KEYS, 4, 6)
local under_way = {queued = true, scheduled = true, started = true}
local lost, found, missing = {}, 0, 0
for _, id in ipairs(ARGV) do lost[id] = not redis.call('ZSCORE', paused, id) or nil end
local function look_in(list)
  for first = 0, redis.call('LLEN', list) - 1, 1000 do
    if not next(lost) then return end
    for _, id in ipairs(redis.call('LRANGE', list, first, first + 999)) do lost[id] = nil end
  end
end
look_in((where(ARGV[1])))
look_in(transit)
if next(lost) then
  for _, entry in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
    lost[string.match(entry, '^(.*):') or entry] = nil
  end
end
look_in(rq)  -- last, because it may be long
for _, id in ipairs(ARGV) do
  if lost[id] then
    missing = missing + 1
    if under_way[redis.call('HGET', jobs .. id, 'status') or ''] then
      redis.call('HSET', jobs .. id, 'status', 'queued')
      push(id, false)
      found = found + 1
    end
  end
end
if redis.call('EXISTS', (where(ARGV[1]))) == 1 then
  enter(ARGV[1])
  keep(base .. 'waits', 86400)
  call_workers(ARGV[1])
end
return {found, missing}
