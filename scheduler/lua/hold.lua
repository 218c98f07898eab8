-- hold: take what only one process may do at a time, or keep it.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 hold     who does it; it always has a TTL, so a holder that dies is followed by another
-- ARGV    1 token     names the holder
--         2 ttl       ms from now for which it is the holder
--         3 renew     1: only keep what the caller holds; 0: take it, where nobody holds it
-- From    any state
-- To      the same state
-- Returns 1 where the caller is the holder now
--
-- Whoever slept past its TTL must not get it again by renewing: another process may have held it, and be done.

local hold = KEYS[19]
local token, ttl, renew = ARGV[1], ARGV[2], ARGV[3]

allow_at_maxmemory()
local holder = redis.call('GET', hold)
if holder ~= token and (holder or renew == '1') then return 0 end
redis.call('SET', hold, token, 'PX', ttl)
return 1
