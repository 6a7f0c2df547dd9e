-- Deletes a worker's record over which someone has written a value of another type; the next heartbeat writes all of
-- it again. KEYS: the record. ARGV: nothing. Returns 0.
local reply = redis.pcall('HEXISTS', KEYS[1], 'state')
if type(reply) == 'table' and string.find(reply.err, 'WRONGTYPE', 1, true) then redis.call('DEL', KEYS[1]) end
return 0
