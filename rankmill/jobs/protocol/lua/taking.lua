-- For take.lua; it uses pushing.lua.
-- Moves jobs of runs from the front of RQ's list to the front of their own lists, up to the first job by name. A job of
-- a run is in RQ's list if RQ's own code has put it there, or for a worker that is gone now.
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
