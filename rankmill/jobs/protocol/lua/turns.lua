-- For scripts that count turns; it uses waiting.lua. A job's hash contains its pairs, and its tenant's
-- weight.
local function costs_of(id)  -- what a job's turn costs its tenant, and its run
  local said = redis.pcall('HMGET', jobs .. id, 'pairs', 'weight')
  local rows, weight = tonumber(said[1] or nil) or 0, tonumber(said[2] or nil) or 0
  if not (rows > 0 and rows < 1e9) then rows = 32 end
  return {rows / (weight > 0 and weight or 1), rows}
end
local function charge(scope, name, had, cost)  -- a negative cost gives a turn back
  if cost > 0 then
    had = math.max(had, level(scope))  -- whoever could not be served for a while gains no credit
    redis.call('SET', base .. 'level:' .. scope, had, 'EX', 86400)
  end
  redis.call('ZADD', base .. 'turns:' .. scope, 'XX', had + cost, name)
end
local function count(id, turns)  -- counts a job's turn, or gives it back (-1)
  local _, scopes = where(id)
  for at, scope in ipairs(scopes) do
    local had = tonumber(redis.call('ZSCORE', base .. 'turns:' .. scope[1], scope[2]) or 0)
    charge(scope[1], scope[2], had, turns * costs_of(id)[at])
  end
end
