-- Deletes a run, and notes that it was cancelled. A full server accepts the note only after the deletion.
-- KEYS: the note, the keys of the run to delete. ARGV: expiry of the note (s). Returns nothing.
redis.call('UNLINK', unpack(KEYS, 2))
redis.call('SET', KEYS[1], 1, 'EX', ARGV[1])
