-- Writes a job's heartbeat, unless the job is gone. KEYS: the job. ARGV: the time, as RQ writes it.
-- Returns 0, as HSET does for an existing field.
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'last_heartbeat', ARGV[1]) end
return 0
