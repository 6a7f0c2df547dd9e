-- Forgets the leases that have lapsed.
-- KEYS: the leases. ARGV: length of the leases (s). Returns the holders, in the order in which their leases lapse.
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
bound(KEYS[1], now, tonumber(ARGV[1]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now)
return redis.call('ZRANGE', KEYS[1], 0, -1)
