-- Counts failed attempts at chunks of a run; rankmill/jobs/contract/job.py says how many attempts a chunk has.
-- KEYS: the run, its failed attempts. ARGV: expiry of the failed attempts (s), the attempts. Returns nothing. If the
-- run is gone, nothing is written, because nobody would delete the key.
if redis.call('EXISTS', KEYS[1]) == 0 then return end
for at = 2, #ARGV do redis.call('SADD', KEYS[2], ARGV[at]) end
redis.call('EXPIRE', KEYS[2], ARGV[1])
