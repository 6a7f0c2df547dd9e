-- Takes idle workers off the set `idle` for new work. Takes none while jobs wait: idle workers will take these jobs.
-- KEYS: see waiting.lua. ARGV: the most workers. Returns how many were taken.
if redis.call('LLEN', rq) + tonumber(redis.call('GET', base .. 'waits') or 0) > 0 then return 0 end
redis.call('ZREMRANGEBYSCORE', base .. 'idle', 0, '(' .. redis.call('TIME')[1])
return #redis.call('ZPOPMAX', base .. 'idle', ARGV[1]) / 2
