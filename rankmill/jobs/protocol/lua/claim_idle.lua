-- Forgets idle workers that are to be given work, unless jobs wait, which they will take.
-- KEYS: the queue, the idle workers. ARGV: how many at most. Returns how many it forgot.
if redis.call('LLEN', KEYS[1]) > 0 then return 0 end
redis.call('ZREMRANGEBYSCORE', KEYS[2], 0, '(' .. redis.call('TIME')[1])
return #redis.call('ZPOPMAX', KEYS[2], ARGV[1]) / 2
