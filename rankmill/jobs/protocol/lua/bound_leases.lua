-- Applies bound.lua to leases that stay in Redis when they lapse (see leases.py).
-- KEYS: the leases. ARGV: how far from now a lease may end (s). Returns nothing.
local clock = redis.call('TIME')
bound(KEYS[1], clock[1] + clock[2] / 1000000, tonumber(ARGV[1]))
