-- For scripts that count the turns of tenants and runs; it uses waiting.lua. A job's hash contains the number of its
-- pairs, and its tenant's weight.
local function costs_of(id)  -- what a job's turn costs its tenant, and its run
  local said = redis.pcall('HMGET', jobs .. id, 'pairs', 'weight')
  local rows, weight = tonumber(said[1] or nil) or 0, tonumber(said[2] or nil) or 0
  if not (rows > 0 and rows < 1e9) then rows = 32 end
  return {rows / (weight > 0 and weight or 1), rows}
end
local function charge(scope, name, had, cost)
  had = math.max(had, level(scope))  -- whoever could not be served for a while gains no credit
  redis.call('SET', base .. 'level:' .. scope, had, 'EX', 86400)
  redis.call('ZADD', base .. 'turns:' .. scope, 'XX', had + cost, name)
end
local function give_back(id)  -- gives back the turn of a job that waits again
  local _, scopes = where(id)
  for at, scope in ipairs(scopes) do
    redis.call('ZADD', base .. 'turns:' .. scope[1], 'XX', 'INCR', -costs_of(id)[at], scope[2])
  end
end
