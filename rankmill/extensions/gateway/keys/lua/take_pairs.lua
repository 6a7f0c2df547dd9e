-- Takes pairs from a token bucket, which fills in a minute. A pair is 60,000,000 parts: with a limit of N pairs a
-- minute, the bucket gets N parts each microsecond, and all sums are whole numbers.
-- KEYS: the bucket. ARGV: most pairs in the bucket, the pairs to take. Returns 0 if the pairs were taken; otherwise
-- takes nothing, and returns the seconds until the bucket has enough pairs.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local most, wanted = ARGV[1] * 60000000, ARGV[2] * 60000000
local bucket = redis.call('HMGET', KEYS[1], 'left', 'at')
local since = math.max(now - (bucket[2] or now), 0)
local left = math.min((bucket[1] or most) + since * ARGV[1], most)
local missing = math.max(wanted - left, 0)
if missing == 0 then left = left - wanted end
redis.call('HSET', KEYS[1], 'left', left, 'at', now)
redis.call('EXPIRE', KEYS[1], 61)
return math.ceil(missing / ARGV[1] / 1000000)
