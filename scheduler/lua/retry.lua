-- retry: an attempt failed and another is allowed; the job waits until it is due.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the job's lane
--         20 back     what waits again there
-- ARGV    1 consumer  who ran the job
--         2 lane      name of the lane
--         3 entry     the job's entry
--         4 delivery  of this attempt
--         5 delay     ms until it is due again
--         6 crashed   1: the engine died with it in flight (a crash, no attempt spent); else 0
-- From    running
-- To      delayed
-- Returns 1, or 0 where the lease belongs to another delivery and nothing was written

local stream, back = KEYS[19], KEYS[20]
local consumer, lane, entry, delivery, delay, crashed = unpack(ARGV)

allow_at_maxmemory()
if not holds(stream, entry, delivery, consumer) then return 0 end
local now, meta = clock(), meta_of(lane)
local _, a, c, p, flags = past(lane, entry)
local crash = tonumber(crashed)
remember(lane, entry, delivery, a + 1 - crash, c + crash, p, flags)
settle_start(lane, entry, true)
local due = tonumber(delay) > 0 and now + tonumber(delay) or nil
wait_again(lane, meta, stream, back, entry, due, now)
return 1
