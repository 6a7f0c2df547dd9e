-- Ends the transaction that settles something for a run. If the run was cancelled meanwhile, it deletes what was
-- settled, because the caller may die before it learns of that.
-- KEYS: the run, the keys of what is settled. No ARGV. Returns nothing.
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('UNLINK', unpack(KEYS, 2)) end
