-- Removes waiting jobs of a run, with their hashes and payloads. A bulk run is also removed from the sorted set in
-- which its tenant's runs take turns.
-- KEYS: see waiting.lua; then the prefix of the keys of the run's payloads. ARGV: the most jobs to remove from the list
-- of a bulk run; the ids of a request's jobs, or the id of any job of a bulk run. Returns how many were removed.
local list, scopes = where(ARGV[2])
local run, gone, removed = run_of(ARGV[2]), {}, 0
local function remove(id)
  gone[#gone + 1], gone[#gone + 2] = jobs .. id, KEYS[4] .. string.sub(id, #run + 2)
end
for _, id in ipairs(redis.call('LRANGE', rq, 0, 127)) do
  if run_of(id) == run then
    redis.call('LREM', rq, 1, id)
    remove(id)
  end
end
if scopes[2] then
  redis.call('ZREM', base .. 'turns:' .. scopes[2][1], scopes[2][2])
  for _, id in ipairs(redis.call('LPOP', list, ARGV[1]) or {}) do
    remove(id)
    removed = removed + 1
  end
else
  for at = 2, #ARGV do
    if redis.call('LREM', list, 1, ARGV[at]) == 1 then
      remove(ARGV[at])
      removed = removed + 1
    end
  end
end
if removed > 0 then more(-removed) end
if #gone > 0 then redis.call('UNLINK', unpack(gone)) end
return #gone / 2
