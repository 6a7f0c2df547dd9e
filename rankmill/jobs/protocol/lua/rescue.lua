-- Puts back a job that a worker has taken but not begun, if the first call for this job was long ago.
-- KEYS: see waiting.lua; then the jobs in transit, the time of the first call for this job. ARGV: the job's id, now (s
-- since 1970), how long ago the first call must be (s). Returns nothing.
local transit, seen, id, now = KEYS[4], KEYS[5], ARGV[1], tonumber(ARGV[2])
if not redis.call('LPOS', transit, id) then return end  -- its worker has begun it meanwhile
local since = tonumber(redis.call('GET', seen) or '')
if not since then
  -- the time expires only after a later call has put the job back
  redis.call('SET', seen, ARGV[2], 'EX', math.ceil(4 * tonumber(ARGV[3])))
elseif math.abs(now - since) > tonumber(ARGV[3]) then  -- or the server's clock has jumped back
  redis.call('LREM', transit, 1, id)
  push(id, true)
  give_back(id)
  call_workers(id)
  redis.call('DEL', seen)
end
