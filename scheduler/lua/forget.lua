-- forget: remove a consumer of a lane whose worker is gone and which has nothing pending.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the lane
--         20 worker   the heartbeat of the consumer's worker
-- ARGV    1 consumer  whom to remove
-- From    any state
-- To      the same state
-- Returns 1 where it was removed
--
-- DELCONSUMER destroys pending entries: it may only follow, in one script, the sight of none and of no heartbeat.

local stream, worker = KEYS[19], KEYS[20]
local consumer = ARGV[1]

if redis.call('EXISTS', worker) == 1 then return 0 end
local pending = redis.pcall('XPENDING', stream, 'workers', '-', '+', 1, consumer)
if pending.err or #pending > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', stream, 'workers', consumer)
return 1
