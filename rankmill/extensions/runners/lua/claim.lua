-- Takes the first run that waits. A run that a runner already holds is only removed from the queue: after a lost
-- reply, a run may be in both places.
-- KEYS: the queue, the leases. ARGV: the lease's time in RQ's registry (s from now), a new token for the entry of
-- the lease, number of runs to look at, ids that this runner leaves to others. Returns the run's id, or nothing.
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
