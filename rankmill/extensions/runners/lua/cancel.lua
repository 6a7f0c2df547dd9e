-- Cancels a run. If the run waits, the caller takes it from the queue, and must then write its end.
-- KEYS: the cancellation, the queue, the leases. ARGV: the run's id, expiry (s), length of the lease (s), the
-- claim. Returns 1 if the run waited, else 0.
redis.call('SET', KEYS[1], 1, 'EX', ARGV[2])
if redis.call('LREM', KEYS[2], 0, ARGV[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[3], redis.call('TIME')[1] + ARGV[3], ARGV[1] .. ':' .. ARGV[4])
return 1
