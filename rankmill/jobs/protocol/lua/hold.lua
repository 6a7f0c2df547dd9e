-- Begins or renews a lease that stays in Redis when it lapses (see leases.py).
-- KEYS: the leases. ARGV: the holder, the length (s), 1 to renew only an existing lease, else 0. Returns nothing.
local clock = redis.call('TIME')
local ends = clock[1] + clock[2] / 1000000 + ARGV[2]
local added = ARGV[3] == '1' and {'XX', ends, ARGV[1]} or {ends, ARGV[1]}
redis.call('ZADD', KEYS[1], unpack(added))
