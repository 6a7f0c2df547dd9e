-- Adds what results of a run have used (pairs, tokens, device time) to the accounts of the run's tenant. To count each
-- result once, the script also deletes its entry from the run's stream (XDEL), or adds the entry's id to a set (SADD).
-- The entry 'end' stands for usage that is known only when the run ends; XDEL then deletes the whole stream.
-- KEYS: the stream of results or the set of entries, the prefix of the accounts' keys.
-- ARGV: XDEL or SADD, expiry of the accounts (s), most entries of a day, the tenant's digits, its name, the model;
--   then for each result its entry, the number of its devices, and for each device its name and five amounts.
-- Returns nothing; usage is not counted in damaged accounts.
local day = KEYS[2] .. math.floor(redis.call('TIME')[1] / 86400)

local function add(device, at)
  local entry = ARGV[4] .. '|' .. device .. '|' .. ARGV[6]
  local known = redis.call('HGET', day, entry)
  if not known and redis.call('HINCRBY', day, 'entries', 1) > tonumber(ARGV[3]) then
    entry, known = 'other', redis.call('HGET', day, 'other')
  elseif ARGV[5] ~= '' then
    redis.call('HSET', day, 'name|' .. ARGV[4], ARGV[5])
  end
  local sums = {}
  for each in string.gmatch(known or '0 0 0 0 0', '%d+') do
    sums[#sums + 1] = string.format('%.0f', each + ARGV[at + #sums])
  end
  redis.call('HSET', day, entry, table.concat(sums, ' '))
  redis.call('EXPIRE', day, ARGV[2])
end

local at = 7
while at < #ARGV do
  local entry, devices = ARGV[at], tonumber(ARGV[at + 1])
  local counts
  if entry == 'end' and ARGV[1] == 'XDEL' then
    counts = redis.call('UNLINK', KEYS[1]) == 1
  else
    counts = redis.call(ARGV[1], KEYS[1], entry) == 1
  end
  at = at + 2
  for _ = 1, devices do
    if counts then pcall(add, ARGV[at], at + 1) end
    at = at + 6
  end
end
