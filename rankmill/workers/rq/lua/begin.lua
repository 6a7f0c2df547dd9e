-- Starts a job for a worker. KEYS: the job's executions, the leases, the job, the jobs in transit, RQ's list,
-- the list in which the job may wait, the number of jobs that wait in such lists. ARGV: the execution, the
-- job's id, its remaining retries, its expiry from now on (s, -1: none), fields of the job. Returns 1, or 0 if the
-- job is gone or over, another worker has tried it since it was read, or another execution has a lease. A job that is
-- over was in the queue twice: RQ would run it again, with the same arguments.
local taken = redis.call('LREM', KEYS[4], 1, ARGV[2])
local job = redis.call('HMGET', KEYS[3], 'status', 'retries_left')
local over = {failed = true, finished = true, canceled = true}
if not job[1] or over[job[1]] or (job[2] or '') ~= ARGV[3] then return 0 end
if ARGV[4] == '-1' then redis.call('PERSIST', KEYS[3]) else redis.call('EXPIRE', KEYS[3], ARGV[4]) end
for _, execution in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if execution ~= ARGV[1] and redis.call('ZSCORE', KEYS[2], ARGV[2] .. ':' .. execution) then
    redis.call('HSET', KEYS[3], 'status', 'started')  -- whoever enqueued the job again has changed the status
    return 0
  end
end
redis.call('HSET', KEYS[3], unpack(ARGV, 5))
if taken == 0 and redis.call('LREM', KEYS[5], 1, ARGV[2]) == 0 then  -- the job was put back while its worker stood still
  if redis.call('LREM', KEYS[6], 1, ARGV[2]) == 1 and redis.call('EXISTS', KEYS[7]) == 1 then
    redis.call('DECR', KEYS[7])
  end
end
return 1
