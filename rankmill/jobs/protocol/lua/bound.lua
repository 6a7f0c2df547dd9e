-- For scripts with leases: lets no entry of the sorted set `ends` end later than a lease of `length` seconds
-- that begins `now`, or than 120 s (UNRENEWED_SECONDS of leases.py) from now, as others may have another
-- length. One that ends later was written before the server's clock jumped back.
local function bound(ends, now, length)
  local last = now + math.max(length, 120)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '(' .. last, '+inf')) do
    redis.call('ZADD', ends, last, name)
  end
end
