-- Renews a runner's lease of a run, and writes the run's record.
-- KEYS: the leases, the record, the cancellation, the job. ARGV: the entry, its time in RQ's registry (s from
-- now), the record, its expiry (s). Returns held, cancelled, lost (the lease has ended, and another runner may have
-- the run) or forgotten (by the server).
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return redis.call('EXISTS', KEYS[2]) == 1 and 'lost' or 'forgotten'
end
redis.call('ZADD', KEYS[1], redis.call('TIME')[1] + ARGV[2], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('EXPIRE', KEYS[4], ARGV[4])
return redis.call('EXISTS', KEYS[3]) == 1 and 'cancelled' or 'held'
