-- Takes a webhook that is due.
-- KEYS: the webhooks. ARGV: seconds after which another runner may try, if this one dies. Returns the run's
-- id, or nothing.
local now = redis.call('TIME')[1]
local found = redis.call('ZRANGEBYSCORE', KEYS[1], 0, now, 'LIMIT', 0, 1)[1]
if found then redis.call('ZADD', KEYS[1], now + ARGV[1], found) end
return found
