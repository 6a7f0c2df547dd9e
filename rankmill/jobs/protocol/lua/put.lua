-- Puts jobs of a run, or a job by name, into their waiting list: new jobs at the end, returning jobs at the front.
-- KEYS: see waiting.lua. ARGV: 1 for the front, else 0; 1 to subtract the jobs' pairs from the counts of their tenant
-- and run, else 0; the jobs' ids. Returns nothing.
for at = 3, #ARGV do
  push(ARGV[at], ARGV[1] == '1')
  if ARGV[2] == '1' then give_back(ARGV[at]) end
end
call_workers(ARGV[#ARGV])
