-- stay: keep the places of calls that a gateway still serves.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 passes   the calls of one API key that run or wait
-- ARGV    1 lease     ms from now after which they are over, unless they are renewed again
--         2.. pass    the calls
-- From    any state
-- To      the same state
-- Returns 1

local passes = KEYS[19]
local lease = ARGV[1]

allow_at_maxmemory()
local ends = clock() + lease
for i = 2, #ARGV do redis.call('ZADD', passes, ends, ARGV[i]) end
redis.call('PEXPIRE', passes, 2 * lease)
return 1
