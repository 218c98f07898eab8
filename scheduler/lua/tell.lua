-- tell: deltas of running jobs, on their way to the client that waits for them.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 inbox    of the client that waits
-- ARGV    1 deltas    encoded
-- From    running
-- To      running
-- Returns 1
--
-- One command for XADD and EXPIRE in a transaction: no inbox without its TTL. Refused at maxmemory, before any effect.

local inbox = KEYS[19]
local deltas = ARGV[1]

redis.call('XADD', inbox, 'MAXLEN', '~', 10000, '*', 't', 'd', 'd', deltas)
redis.call('PEXPIRE', inbox, 600000)
return 1
