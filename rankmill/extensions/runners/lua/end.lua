-- Ends a run that is held.
-- KEYS: the leases, the record, the job, the cancellation, the refusals, the webhooks. ARGV: the entry, the
-- record, its expiry (s), the run's id, 1 if a webhook is due, else 0. Returns 1, or 0 if the run was not held.
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
if ARGV[5] == '1' then
  redis.call('ZADD', KEYS[6], redis.call('TIME')[1], ARGV[4])
  redis.call('EXPIRE', KEYS[6], ARGV[3])
end
return 1
