-- Moves the next job of a queue to the jobs in transit, and counts its pairs as a turn of its tenant and its run. The
-- cost does not depend on how many jobs wait.
-- KEYS: see waiting.lua; then the jobs in transit, the registered workers. ARGV: the kinds of jobs, in order; the
-- worker; 1 if the worker waits at RQ's list when it gets no job, else 0; 1 if the worker is idle when it gets no job,
-- else 0; expiry (s) of the worker's entries in `waiters` and `idle`; the runs that the worker does not take. Returns
-- the job's id, or '' if none; then the numbers of waiting jobs, of workers, and of idle workers.

-- Moves jobs of runs from the front of RQ's list to the front of their own lists, up to the first job by name. A run's
-- job is in RQ's list if RQ's own code has put it there, or if it was moved there for a worker that is gone now.
local function bring_strays()
  for _ = 1, 64 do
    local id = redis.call('LINDEX', rq, 0)
    if id and not run_of(id) then enter(id) end
    if not id or not run_of(id) then return end
    redis.call('LPOP', rq)
    push(id, true)
  end
end
local costs
-- Returns the next job for this worker, and counts its turn. The tenants or runs in `turns:<scope>` are tried in order
-- until one has a job. The function `try` gets the name of a tenant or run; it returns a job or nil, and whether jobs
-- wait that the worker does not take.
local function next_of(scope, try)
  local turns, skipped = base .. 'turns:' .. scope, 0
  while true do
    local name, had = unpack(redis.call('ZRANGE', turns, skipped, skipped, 'WITHSCORES'))
    if not name then return end
    local id, waits = try(name)
    if id then
      costs = costs or costs_of(id)
      charge(scope, name, tonumber(had), costs[string.find(scope, ':') and 2 or 1])
      return id
    end
    if waits then skipped = skipped + 1 else redis.call('ZREM', turns, name) end
  end
end
local alone, take = {}, {}
for at = 6, #ARGV do alone[ARGV[at]] = true end
bring_strays()
function take.request(tenant)  -- looks at the first 64 jobs only
  local list = tenant == '' and rq or base .. 'waiting:requests:' .. tenant
  local ids = redis.call('LRANGE', list, 0, 63)
  for _, id in ipairs(ids) do
    local run = run_of(id) or 'r' .. id
    if where(id) == list and not alone[run] then redis.call('LREM', list, 1, id) return id end
  end
  return nil, #ids > 0
end
function take.bulk(tenant)
  local id = next_of('bulk:' .. tenant, function(run)
    local list = base .. 'waiting:' .. run
    if alone[run] then return nil, redis.call('EXISTS', list) == 1 end
    return redis.call('LPOP', list) or nil, false
  end)
  return id, not id and redis.call('EXISTS', base .. 'turns:bulk:' .. tenant) == 1
end
local found
for kind in string.gmatch(ARGV[1], '%a+') do
  found = found or next_of(kind, take[kind])
  if kind == 'request' and not found then redis.call('DEL', base .. 'bell') end
end
if found then
  if run_of(found) then more(-1) end
  redis.call('RPUSH', KEYS[4], found)
end
local now = redis.call('TIME')[1]
for at, key in ipairs({base .. 'waiters', base .. 'idle'}) do
  if found or ARGV[2 + at] ~= '1' then redis.call('ZREM', key, ARGV[2])
  else redis.call('ZADD', key, now + ARGV[5], ARGV[2]) redis.call('EXPIRE', key, ARGV[5]) end
end
local waits = tonumber(redis.call('GET', base .. 'waits') or 0) + redis.call('LLEN', rq)
return {found or '', waits, redis.call('SCARD', KEYS[5]), redis.call('ZCOUNT', base .. 'idle', now, '+inf')}
