-- Counts the waiting jobs of a queue, and corrects the stored count (`waits`). Also notes whether plain RQ workers
-- listen on the queue (`plain`). One worker of the queue calls this regularly, and so does the gateway.
-- KEYS: see waiting.lua; then the registered workers. No ARGV. Returns the number of waiting requests, and the tenants
-- whose bulk work waits.
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
redis.call('DEL', base .. 'waits')  -- a full server refuses SET as a script's first write, but accepts it after DEL
redis.call('SET', base .. 'waits', waits, 'EX', 86400)
redis.call('DEL', base .. 'plain')
for _, worker in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local born, is_ours = unpack(redis.pcall('HMGET', worker, 'birth', 'scoring'))
  if born and not is_ours then redis.call('SET', base .. 'plain', 1, 'EX', 300) end
end
return {requests, tenants}
