-- Runs at the end of the transaction that sends jobs, which gives them all of their attempts. If the reply was lost,
-- the transaction is repeated: this script then takes away the attempts that have failed since the first time.
-- KEYS: failed attempts of the run, paused jobs, the jobs. ARGV: for each job the chunk, its failed attempts
-- when it was sent, and the job's id. Returns nothing.
if redis.call('EXISTS', KEYS[1]) == 0 then return end
for at = 3, #KEYS do
  local chunk, failed, id = unpack(ARGV, at * 3 - 8, at * 3 - 6)
  local more = 0
  while redis.pcall('SISMEMBER', KEYS[1], chunk .. ':' .. failed + more + 1) == 1 do more = more + 1 end
  if more > 0 then
    local left = (redis.call('HGET', KEYS[at], 'retries_left') or 0) - more
    redis.call('HSET', KEYS[at], 'retries_left', math.max(left, 0))
    if left < 0 then redis.call('HSET', KEYS[at], 'status', 'failed') end  -- so that no worker begins it
    redis.call('ZREM', KEYS[2], id)
  end
end
