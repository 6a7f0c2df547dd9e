-- Forgets idle workers that will be given work. While jobs wait, it forgets none, because idle workers take these jobs.
-- KEYS: see waiting.lua. ARGV: the most workers. Returns how many it forgot.
if redis.call('LLEN', rq) + tonumber(redis.call('GET', base .. 'waits') or 0) > 0 then return 0 end
redis.call('ZREMRANGEBYSCORE', base .. 'idle', 0, '(' .. redis.call('TIME')[1])
return #redis.call('ZPOPMAX', base .. 'idle', ARGV[1]) / 2
