-- Puts a job behind those of its priority, or before them; a request rings the bell.
-- KEYS: the queue, its bell. ARGV: rings, expiry of the bell (s), the job's id, 1 for the front. Returns
-- nothing.
place(ARGV[3], ARGV[4] == '1')
if not is_bulk(ARGV[3]) then ring(KEYS[2]) end
