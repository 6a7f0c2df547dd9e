-- For the scripts of a queue. KEYS[1]: the prefix of the queue's keys, `rankmill:queue:<queue>:`; KEYS[2]: RQ's own
-- list; KEYS[3]: the prefix of keys of jobs.
-- `waiting:<run>`: the jobs of a bulk run. `waiting:requests:<tenant>`: the jobs of all requests of a tenant. Jobs by
-- name wait in RQ's list. `waits`: the number of jobs that wait outside of RQ's list.
-- `turns:<scope>`: how many pairs workers took from each tenant or run; the lowest number is next (start-time fair
-- queueing). The scopes `request` and `bulk` have tenants, whose numbers are divided by their weights. A scope
-- `bulk:<tenant>` has the tenant's bulk runs. An entry without waiting jobs is removed when its turn comes.
-- `level:<scope>`: the highest number that an entry had when its turn came; new entries begin with it.
local base, rq, jobs = unpack(KEYS, 1, 3)
local function run_of(id) return string.match(id, '^(r?%x+)%-[%d_]+$') end
local function where(id)  -- the list in which a job waits; then its scopes, with its name in each
  local run = run_of(id)
  if not run then return rq, {{'request', ''}} end
  local tenant = string.sub(run, -12)
  if string.sub(run, 1, 1) == 'r' then return base .. 'waiting:requests:' .. tenant, {{'request', tenant}} end
  return base .. 'waiting:' .. run, {{'bulk', tenant}, {'bulk:' .. tenant, run}}
end
local function level(scope)
  local known = redis.call('GET', base .. 'level:' .. scope)
  return tonumber(known or redis.call('ZRANGE', base .. 'turns:' .. scope, 0, 0, 'WITHSCORES')[2] or 0)
end
local function keep(key, seconds)  -- extends an expiry, but never shortens it
  if redis.call('TTL', key) < seconds then redis.call('EXPIRE', key, seconds) end
end
local function more(jobs_more)  -- counts this many more waiting jobs
  redis.call('INCRBY', base .. 'waits', jobs_more)
  keep(base .. 'waits', 86400)
end
local function enter(id)  -- enters a job's run into the turns, for as long as the job exists
  local list, scopes = where(id)
  local left = redis.call('TTL', jobs .. id)
  local seconds = left > 0 and left or 86400
  for _, scope in ipairs(scopes) do
    redis.call('ZADD', base .. 'turns:' .. scope[1], 'NX', level(scope[1]), scope[2])
    keep(base .. 'turns:' .. scope[1], seconds)
  end
  if list ~= rq then keep(list, seconds) end
end
-- What a job's turn costs its tenant, and its run. A job's hash contains the number of its pairs, and its tenant's
-- weight.
local function costs_of(id)
  local said = redis.pcall('HMGET', jobs .. id, 'pairs', 'weight')
  local rows, weight = tonumber(said[1] or nil) or 0, tonumber(said[2] or nil) or 0
  if not (rows > 0 and rows < 1e9) then rows = 32 end
  return {rows / (weight > 0 and weight or 1), rows}
end
local function charge(scope, name, had, cost)
  had = math.max(had, level(scope))  -- an entry that was not served for a while gains no credit
  redis.call('SET', base .. 'level:' .. scope, had, 'EX', 86400)
  redis.call('ZADD', base .. 'turns:' .. scope, 'XX', had + cost, name)
end
local function give_back(id)  -- undoes `charge` for a job that waits again
  local _, scopes = where(id)
  for at, scope in ipairs(scopes) do
    redis.call('ZADD', base .. 'turns:' .. scope[1], 'XX', 'INCR', -costs_of(id)[at], scope[2])
  end
end
-- Puts a job into its waiting list. Each job of a request adds an entry to the list `bell`, which wakes a worker that is
-- full of bulk work.
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
-- of these jobs are not counted for their tenant and run, because no other jobs waited. No jobs are moved if plain RQ
-- workers wait at RQ's list, too: they would take the jobs, and use up the attempts.
local function call_workers(id)
  if redis.call('EXISTS', base .. 'plain') == 1 then return end
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
