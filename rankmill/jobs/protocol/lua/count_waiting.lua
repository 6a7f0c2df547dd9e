-- Counts what waits, and corrects the count; the sweep of a worker runs it, for all, and the gateway.
-- KEYS: see waiting.lua. No ARGV. Returns how many requests wait, and the tenants whose bulk work waits.
local requests, waits, tenants = redis.call('LLEN', rq), 0, {}
for _, tenant in ipairs(redis.call('ZRANGE', base .. 'turns:request', 0, -1)) do
  waits = waits + redis.call('LLEN', base .. 'waiting:requests:' .. tenant)
end
requests = requests + waits
for _, tenant in ipairs(redis.call('ZRANGE', base .. 'turns:bulk', 0, -1)) do
  local before = waits
  for _, run in ipairs(redis.call('ZRANGE', base .. 'turns:bulk:' .. tenant, 0, -1)) do
    waits = waits + redis.call('LLEN', base .. 'waiting:' .. run)
  end
  if waits > before then tenants[#tenants + 1] = tenant end
end
redis.call('DEL', base .. 'waits')  -- a full server lets a script go on that has begun to write
redis.call('SET', base .. 'waits', waits, 'EX', 86400)
return {requests, tenants}
