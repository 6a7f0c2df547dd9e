-- Renews those leases that still exist.
-- KEYS: the leases. ARGV: length of the leases (s), the holders. Returns nothing.
local clock = redis.call('TIME')
for place = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', clock[1] + clock[2] / 1000000 + ARGV[1], ARGV[place])
end
local seconds = math.ceil(ARGV[1])
-- other leases of the set may last longer
if redis.call('TTL', KEYS[1]) < seconds then redis.call('EXPIRE', KEYS[1], seconds) end
