-- Deletes a run, and notes that it was cancelled. A full server takes the note after the deletion.
-- KEYS: the note, what is deleted of the run. ARGV: expiry of the note (s). Returns nothing.
redis.call('UNLINK', unpack(KEYS, 2))
redis.call('SET', KEYS[1], 1, 'EX', ARGV[1])
