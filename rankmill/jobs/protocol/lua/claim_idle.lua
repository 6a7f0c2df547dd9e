-- Forgets idle workers that are to be given work, unless jobs wait, which they will take.
-- KEYS: see waiting.lua. ARGV: how many at most. Returns how many it forgot.
if redis.call('LLEN', rq) + tonumber(redis.call('GET', base .. 'waits') or 0) > 0 then return 0 end
redis.call('ZREMRANGEBYSCORE', base .. 'idle', 0, '(' .. redis.call('TIME')[1])
return #redis.call('ZPOPMAX', base .. 'idle', ARGV[1]) / 2
