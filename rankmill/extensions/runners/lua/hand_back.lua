-- Puts a run back into the queue, if the caller still holds it.
-- KEYS: the leases, the record, the queue. ARGV: the entry, the record, its expiry (s), the run's id, LPUSH or
-- RPUSH. Returns 1, or 0 if the run was not held.
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call(ARGV[5], KEYS[3], ARGV[4])
return 1
