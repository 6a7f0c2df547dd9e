-- For take.lua; it uses pushing.lua. Moves jobs from the front of RQ's list to the front of the lists where they
-- belong. Stock RQ has put a job of a run into its list, or the worker that the job was for is gone. A job by name
-- stays.
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
-- Finds the first tenant or run in the turns of `scope` that has a job, counts its turn, and returns the job. `try`
-- returns a job of the tenant or run, or nil, and whether it has jobs that this worker leaves alone.
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
