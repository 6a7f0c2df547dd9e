-- Adds a run with waiting jobs to the sorted sets of tenants and runs (`turns:<scope>`), in case the server has lost
-- its entry. Also gives jobs of the run to workers that wait at RQ's list, and renews the expiry of the count of
-- waiting jobs.
-- KEYS: see waiting.lua. ARGV: the id of a job of the run. Returns nothing.
if redis.call('EXISTS', (where(ARGV[1]))) == 1 then
  enter(ARGV[1])
  keep(base .. 'waits', 86400)
  call_workers(ARGV[1])
end
