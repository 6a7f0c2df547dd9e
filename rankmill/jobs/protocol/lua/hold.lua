-- Begins or renews a lease whose entry stays when the lease lapses.
-- KEYS: the leases. ARGV: the holder, the length (s), 1 to only renew, else 0. Returns nothing.
local clock = redis.call('TIME')
local ends = clock[1] + clock[2] / 1000000 + ARGV[2]
local added = ARGV[3] == '1' and {'XX', ends, ARGV[1]} or {ends, ARGV[1]}
redis.call('ZADD', KEYS[1], unpack(added))
