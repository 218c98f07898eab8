-- let_go: give up a hold, so that another process need not wait for its TTL.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 hold     who holds
-- ARGV    1 token     names the holder that gives it up
-- From    any state
-- To      the same state
-- Returns 1 where the caller was the holder

local hold = KEYS[19]
local token = ARGV[1]

if redis.call('GET', hold) ~= token then return 0 end
redis.call('DEL', hold)
return 1
