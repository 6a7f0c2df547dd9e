-- For the scripts of a queue, KEYS[1]: a list of job ids with requests in front. The job of a bulk chunk is
-- named <hexadecimal run>-<chunk>; all others are requests' (contract/priority.py). ARGV of those that ring
-- the bell begins with the most rings that it keeps, and its expiry (s).
local queue = KEYS[1]
local function is_bulk(id) return string.match(id, '^%x+%-%d+$') end
local last_run, its_jobs
local function run_of(id)  -- nil if it is no bulk run's; jobs of a run are mostly together, which is quick
  if last_run and string.sub(id, 1, #its_jobs) == its_jobs then return last_run end
  last_run = is_bulk(id) and string.match(id, '^%x+')
  its_jobs = last_run and last_run .. '-'
  return last_run or nil
end
local function named(id)  -- the run, or what stands for one, as contract/priority.py has it
  return string.match(id, '^(r?%x+)%-%d+$') or 'r' .. id
end
local function group_of(id)  -- the tenant, likewise
  local run = named(id)
  return (string.sub(run, 1, 1) == 'r' and 'r' or '') .. string.sub(run, -12)
end
local function first_bulk()
  local head = redis.call('LINDEX', queue, 0)
  if not head or is_bulk(head) then return 0 end
  local low, high = 1, redis.call('LLEN', queue)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_bulk(redis.call('LINDEX', queue, middle)) then high = middle else low = middle + 1 end
  end
  return low
end
local function place(id, at_front)
  if not is_bulk(id) and at_front then return redis.call('LPUSH', queue, id) end
  local next_id = redis.call('LINDEX', queue, first_bulk())
  if next_id then redis.call('LINSERT', queue, 'BEFORE', next_id, id) else redis.call('RPUSH', queue, id) end
end
local function ring(bell)
  redis.call('LPUSH', bell, 1)
  redis.call('LTRIM', bell, 0, tonumber(ARGV[1]) - 1)
  redis.call('EXPIRE', bell, ARGV[2])
end
