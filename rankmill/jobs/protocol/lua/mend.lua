-- Adds a run that has waiting jobs to the sorted sets in which tenants and runs take turns (`turns:<scope>`), in case
-- the server has lost the run's entry there. Also gives jobs of the run to workers that wait at RQ's list.
-- KEYS: see waiting.lua. ARGV: the id of a job of the run. Returns nothing.
if redis.call('EXISTS', (where(ARGV[1]))) == 1 then
  enter(ARGV[1])
  call_workers(ARGV[1])
end
