-- For scripts with leases: bounds the entries of the sorted set `ends`, because an entry that ends later was written
-- before the server's clock jumped back. The bound is `length` seconds from `now`, or 120 s (UNRENEWED_SECONDS of
-- leases.py) if that is more, because others may have leases of another length.
local function bound(ends, now, length)
  local last = now + math.max(length, 120)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '(' .. last, '+inf')) do
    redis.call('ZADD', ends, last, name)
  end
end
