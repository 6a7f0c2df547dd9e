-- Begins or renews a holder's lease, but begins none if there are as many leases as allowed.
-- KEYS: the leases. ARGV: most leases, length of a lease (s), the holder. Returns 1 if the holder has a lease, else 0.
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
bound(KEYS[1], now, tonumber(ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) and not redis.call('ZSCORE', KEYS[1], ARGV[3]) then
  return 0
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
local seconds = math.ceil(ARGV[2])
-- other leases of the set may last longer
if redis.call('TTL', KEYS[1]) < seconds then redis.call('EXPIRE', KEYS[1], seconds) end
return 1
