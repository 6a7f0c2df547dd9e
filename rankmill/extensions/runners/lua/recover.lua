-- Puts runs whose leases have lapsed back into the queue, and shortens leases that end too late (by the function
-- `bound`).
-- KEYS: the leases, the queue. ARGV: 1 to put runs back, 0 only to shorten leases; how far from now a lease's time
-- in RQ's registry may be (s); OURS and RQ_DELAY of leases.py. Returns nothing.
local now = redis.call('TIME')[1]
bound(KEYS[1], now, tonumber(ARGV[2]))
if ARGV[1] == '0' then return end
for _, span in ipairs({{now + ARGV[3], now + ARGV[4]}, {0, now}}) do
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], span[1], span[2])) do
    redis.call('ZREM', KEYS[1], entry)
    redis.call('LPUSH', KEYS[2], string.match(entry, '^(.*):') or entry)
  end
end
