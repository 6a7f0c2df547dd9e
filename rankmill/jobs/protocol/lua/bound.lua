-- For scripts with leases: no time in the sorted set `ends` may be later than `length` seconds from `now`. A later one
-- was written before the server's clock jumped back, and becomes this latest time. If `length` is under 120 s
-- (UNRENEWED_SECONDS of leases.py), 120 s are the limit, because other processes may have longer leases.
local function bound(ends, now, length)
  local last = now + math.max(length, 120)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '(' .. last, '+inf')) do
    redis.call('ZADD', ends, last, name)
  end
end
