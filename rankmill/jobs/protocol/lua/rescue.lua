-- Puts a job back that left the queue and is not begun, if that was seen before, long enough ago.
-- KEYS: the queue, its bell, the jobs in transit, since when the job was seen. ARGV: rings, expiry of the
-- bell (s), the job's id, now (s since 1970), for how long it must have been seen (s). Returns nothing.
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
