-- Ends the transaction that settles something for a run, which may be cancelled meanwhile: whoever settles
-- may be cut off or killed before it hears that.
-- KEYS: the run, what is settled. No ARGV. Returns nothing.
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('UNLINK', unpack(KEYS, 2)) end
