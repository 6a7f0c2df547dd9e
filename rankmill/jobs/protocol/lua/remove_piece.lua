-- Removes the jobs of a run from a piece of the queue, with their hashes and payloads. It begins at the end,
-- as jobs are taken from the beginning meanwhile.
-- KEYS: the queue. ARGV: what the ids begin with, how many jobs behind the piece stay, its length, what keys
-- of jobs and of payloads begin with. Returns how many it removed, and how many stay behind the next piece,
-- or -1.
local queue, jobs, left, job, payload = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[4], ARGV[5]
local length = redis.call('LLEN', queue)
local last = length - 1 - left
local first = math.max(last - tonumber(ARGV[3]) + 1, 0)
local gone = {}
if last < 0 then return {0, -1} end
for place, id in ipairs(redis.call('LRANGE', queue, first, last)) do
  if string.sub(id, 1, #jobs) == jobs then
    redis.call('LSET', queue, first + place - 1, jobs)
    gone[#gone + 1], gone[#gone + 2] = job .. id, payload .. string.sub(id, #jobs + 1)
  end
end
local found = #gone / 2
if found > 0 then
  redis.call('LREM', queue, last > length / 2 and -found or found, jobs)
  redis.call('UNLINK', unpack(gone))
end
return {found, first == 0 and -1 or left + last - first + 1 - found}
