-- Enters a run into the turns again, if the server has lost its entry, and gives jobs to workers that wait.
-- KEYS: see waiting.lua. ARGV: the id of a job of the run. Returns nothing.
if redis.call('EXISTS', (where(ARGV[1]))) == 1 then
  enter(ARGV[1])
  call_workers(ARGV[1])
end
