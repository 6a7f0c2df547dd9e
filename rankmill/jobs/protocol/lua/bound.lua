-- For scripts with leases. Changes each time in the sorted set `ends` that is over `length` seconds after `now` to that
-- limit: such a time was written before the server's clock jumped back. The limit is at least 120 s (UNRENEWED_SECONDS
-- of leases.py), because other processes may have longer leases.
local function bound(ends, now, length)
  local last = now + math.max(length, 120)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '(' .. last, '+inf')) do
    redis.call('ZADD', ends, last, name)
  end
end
