-- Puts back runs whose runner's lease has lapsed.
-- KEYS: the leases, the queue. ARGV: 1 if lapsed leases count, else 0; length of the caller's lease (s). Returns
-- nothing.
local now = redis.call('TIME')[1]
bound(KEYS[1], now, tonumber(ARGV[2]))
if ARGV[1] == '0' then return end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], 0, now)) do
  redis.call('ZREM', KEYS[1], entry)
  redis.call('LPUSH', KEYS[2], string.match(entry, '^(.*):') or entry)
end
