-- Applies bound.lua to leases that stay after they have lapsed.
-- KEYS: the leases. ARGV: their length (s). Returns nothing.
local clock = redis.call('TIME')
bound(KEYS[1], clock[1] + clock[2] / 1000000, tonumber(ARGV[1]))
