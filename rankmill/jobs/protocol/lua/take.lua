-- Moves the next job to those in transit: of the first kind that has one, of the tenant and then of the run
-- that has had the least.
-- KEYS: the queue, the jobs in transit, the bell, the idle workers, the registered workers. ARGV: kinds, the
-- worker, whether it is idle without a job (1 or 0), for how long (s), the jobs among which it chooses,
-- whether to bring requests from the queue's end, where to look for further runs (after how many bulk jobs,
-- at how many); then tenants and runs, who has had least first. A run with ! comes last, one with - is left
-- alone. Returns the job's id or '', how many wait, how many workers there are, and how many of them are
-- idle.
local transit, bell, idle, workers = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local kinds, name, may_idle, now = ARGV[1], ARGV[2], ARGV[3] == '1', redis.call('TIME')[1]
local take, rank = {}, {}
for place = 9, #ARGV do rank[ARGV[place]] = place end
-- Which of two jobs is next: none of a run that is left alone, not one of a run that comes after all others,
-- then the tenant that has had the least, then his run that has had the least.
local function before(id, run, best)
  if rank['-' .. run] then return best end
  local its = {rank['!' .. run] and 1 or 0, rank[group_of(id)] or 0, rank[run] or 0, id = id}
  for at = 1, 3 do
    if best and its[at] ~= best[at] then return its[at] < best[at] and its or best end
  end
  return best or its
end
local function is_first(its) return its and its[1] + its[2] + its[3] == 0 end
local function bring_requests()
  local head = redis.call('LINDEX', queue, 0)
  if ARGV[6] == '0' or not head or not is_bulk(head) then return end
  for _, id in ipairs(redis.call('LRANGE', queue, -tonumber(ARGV[5]), -1)) do
    if not is_bulk(id) then
      redis.call('LREM', queue, -1, id)
      redis.call('LINSERT', queue, 'BEFORE', head, id)
    end
  end
end
function take.request()
  bring_requests()
  local best, at, piece = nil, 0, tonumber(ARGV[5])
  repeat  -- look further if all of a piece are left alone
    local requests = 0
    for _, id in ipairs(redis.call('LRANGE', queue, at, at + piece - 1)) do
      if is_bulk(id) then break end
      requests, best = requests + 1, before(id, named(id), best)
      if is_first(best) then break end
    end
    at = at + piece
  until best or requests < piece or at == 8 * piece
  if not best then redis.call('DEL', bell) return nil end
  redis.call('LREM', queue, 1, best.id)
  redis.call('RPUSH', transit, best.id)
  return best.id
end
-- Brings jobs of runs or tenants that have less than their part of the `near` ones there, out of a piece of
-- the list further back. The list's last jobs get their places: the server walks to a job that it removes.
local function bring_bulk(near, has, last, at, runs, groups)
  local start = at + tonumber(ARGV[7])
  local found, lacking, brought = {}, {}, {}
  local function lacks(name, parts)
    local had, part = has[name] or 0, math.floor(#near / (parts + 1))
    if had >= part or not (lacking[name] or had < part / 2) then return false end
    lacking[name] = true
    return true
  end
  for place, id in ipairs(redis.call('LRANGE', queue, start, start + tonumber(ARGV[8]) - 1)) do
    local run = run_of(id)
    local group = run and group_of(id)
    -- A tenant with its part gets no more runs there: they would take the place of the others' jobs.
    local open = run and (groups == 1 or (has[group] or 0) < #near / groups)
    if open and (lacks(run, runs) or lacks(group, groups)) then
      has[run], has[group] = (has[run] or 0) + 1, (has[group] or 0) + 1
      found[#found + 1] = {id = id, run = run, place = start + place - 1}
    end
  end
  for number = #found, 1, -1 do
    local each, filler = found[number], redis.call('LINDEX', queue, -1)
    if not is_bulk(filler) then break end  -- it is looked for at the end of the list
    redis.call('RPOP', queue)
    if filler ~= each.id then redis.call('LSET', queue, each.place, filler) end
    table.insert(brought, 1, each)
  end
  for _, each in ipairs(brought) do
    local before = last[each.run]
    redis.call('LINSERT', queue, before and 'AFTER' or 'BEFORE', before or near[1], each.id)
    last[each.run] = each.id
  end
  return brought
end
function take.bulk()
  local best, has, last, runs, groups = nil, {}, {}, 0, 0
  local at = first_bulk()
  local near = redis.call('LRANGE', queue, at, at + tonumber(ARGV[5]) - 1)
  for _, id in ipairs(near) do
    local run = run_of(id)
    if run then
      best = before(id, run, best)
      if is_first(best) then break end
      local group = group_of(id)
      if not has[run] then runs = runs + 1 end
      if not has[group] then groups = groups + 1 end
      has[run], has[group], last[run] = (has[run] or 0) + 1, (has[group] or 0) + 1, id
    end
  end
  if #near == 0 then return nil end
  if not is_first(best) and ARGV[8] ~= '0' then
    for _, each in ipairs(bring_bulk(near, has, last, at, runs, groups)) do
      best = before(each.id, each.run, best)
    end
  end
  if not best then return nil end
  redis.call('LREM', queue, 1, best.id)
  redis.call('RPUSH', transit, best.id)
  return best.id
end
local found
for kind in string.gmatch(kinds, '%a+') do
  found = found or take[kind]()
end
if may_idle and not found then
  redis.call('ZADD', idle, now + tonumber(ARGV[4]), name)
  redis.call('EXPIRE', idle, ARGV[4])
else
  redis.call('ZREM', idle, name)
end
local waiting = redis.call('LLEN', queue)
return {found or '', waiting, redis.call('SCARD', workers), redis.call('ZCOUNT', idle, now, '+inf')}
