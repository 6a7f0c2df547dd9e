-- For scripts that put jobs into waiting lists; it uses waiting.lua. Each job of a request adds an entry to the list
-- `bell`, which wakes a worker that is full of bulk work.
local function push(id, at_front)
  local list, scopes = where(id)
  redis.call(at_front and 'LPUSH' or 'RPUSH', list, id)
  if list ~= rq then more(1) end
  enter(id)
  if scopes[1][1] == 'request' then
    redis.call('LPUSH', base .. 'bell', 1)
    redis.call('LTRIM', base .. 'bell', 0, 63)
    redis.call('EXPIRE', base .. 'bell', 60)
  end
end
-- Moves jobs from the waiting list of the job `id` to RQ's list, one for each worker that waits at RQ's list. The pairs
-- of these jobs are not counted for their tenant and run, because no other jobs waited.
local function call_workers(id)
  local list = where(id)
  local now = redis.call('TIME')[1]
  local lacking = redis.call('ZCOUNT', base .. 'waiters', now, '+inf') - redis.call('LLEN', rq)
  while list ~= rq and lacking > 0 do
    local next_id = redis.call('LPOP', list)
    if not next_id then break end
    redis.call('RPUSH', rq, next_id)
    more(-1)
    lacking = lacking - 1
  end
end
