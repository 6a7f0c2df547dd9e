-- Ends a run that the caller holds, or cancels a run. A cancelled run that waits ends at once. If a runner holds
-- the cancelled run, only the cancellation is written, and that runner ends the run when it finds it.
-- KEYS: the leases, the record, the job, the cancellation, the refusals, the webhooks, the queue. ARGV: the
-- entry of the lease, or nothing to cancel the run; the record, its expiry (s), the run's id, 1 if a webhook is
-- due, else 0; 1 if a runner must still delete what is left of the run, else 0. Returns 1, or 0 if the run was
-- not held, or did not wait.
if ARGV[1] == '' then
  redis.call('SET', KEYS[4], 1, 'EX', ARGV[3])
  if redis.call('LREM', KEYS[7], 0, ARGV[4]) == 0 then return 0 end
elseif redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('DEL', KEYS[3])
if ARGV[6] == '1' then
  redis.call('LPUSH', KEYS[7], ARGV[4])
  return 1
end
redis.call('DEL', KEYS[4], KEYS[5])
if ARGV[5] == '1' then
  redis.call('ZADD', KEYS[6], redis.call('TIME')[1], ARGV[4])
  redis.call('EXPIRE', KEYS[6], ARGV[3])
end
return 1
