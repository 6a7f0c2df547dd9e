-- For scripts that let jobs wait; it uses waiting.lua.
-- Each job of a request rings the bell once for workers that are full of bulk work.
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
-- Gives each worker that waits at RQ's list a job there. Such a job costs no turn, because nothing else waited. `id`: a
-- job of the list that has new jobs.
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
