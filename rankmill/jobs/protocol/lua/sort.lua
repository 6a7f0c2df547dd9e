-- Brings requests that RQ alone has put behind bulk work before it.
-- KEYS: the queue, its bell. ARGV: rings, expiry of the bell (s), jobs to look at. Returns how many it moved.
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
