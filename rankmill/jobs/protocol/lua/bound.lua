-- For scripts with leases: lowers each time in the sorted set `ends` that is too late to `length` seconds from `now`.
-- Such a time was written before the server's clock jumped back. At least 120 s (UNRENEWED_SECONDS of leases.py) are
-- left, because the leases of other processes may be longer than `length`.
local function bound(ends, now, length)
  local last = now + math.max(length, 120)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '(' .. last, '+inf')) do
    redis.call('ZADD', ends, last, name)
  end
end
