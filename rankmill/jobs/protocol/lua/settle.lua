-- Settles (decides) the facts with which all chunks of a run are scored, such as the precision. The first value of a
-- fact stays, unless the caller replaces the value. If the run is gone, nothing is written, because nobody would delete
-- the key.
-- KEYS: the run, the settled facts. ARGV: expiry of the facts (s); 1 to replace values that others have settled, else
-- 0; for each fact its name and its value (empty: not known). Returns the settled values; nil if the run is gone.
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
local found = {}
for at = 3, #ARGV, 2 do
  local name, value = ARGV[at], ARGV[at + 1]
  if value ~= '' and (ARGV[2] == '1' or not redis.call('HGET', KEYS[2], name)) then
    redis.call('HSET', KEYS[2], name, value)
  end
  found[#found + 1] = redis.call('HGET', KEYS[2], name) or ''
end
redis.call('EXPIRE', KEYS[2], ARGV[1])
return found
