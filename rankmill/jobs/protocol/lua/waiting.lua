-- For the scripts of a queue. KEYS[1]: the prefix of the queue's keys, `rankmill:queue:<queue>:`; KEYS[2]: RQ's own
-- list; KEYS[3]: the prefix of keys of jobs.
-- `waiting:<run>`: the jobs of a bulk run. `waiting:requests:<tenant>`: the jobs of all requests of a tenant. Jobs by
-- name wait in RQ's list. `waits`: the number of jobs that wait outside of RQ's list.
-- `turns:<scope>`: how many pairs each tenant or run has had; the lowest is next (start-time fair queueing). In the
-- scopes `request` and `bulk` these are tenants, whose pairs are divided by their weights, and in a scope
-- `bulk:<tenant>` the tenant's bulk runs. An entry without waiting jobs is removed when its turn comes.
-- `level:<scope>`: the value that the entry with the last turn had before that turn; new entries begin with it.
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
