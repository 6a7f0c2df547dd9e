-- Counts failed attempts at chunks of a run.
-- KEYS: the run, its failed attempts. ARGV: their expiry (s), the attempts. Returns for each 1 if it is new,
-- else 0; nothing if the run is gone: whoever wrote the key then might die before it is deleted.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local new = {}
for at = 2, #ARGV do new[at - 1] = redis.call('SADD', KEYS[2], ARGV[at]) end
redis.call('EXPIRE', KEYS[2], ARGV[1])
return new
