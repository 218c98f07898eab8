-- first_delta: an interactive job's answer begins; from here on it is never run a second time.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the job's lane
--         20 inbox    of the client that waits
-- ARGV    1 consumer  who runs the job
--         2 lane      name of the lane
--         3 entry     the job's entry
--         4 delivery  of this attempt
--         5 id        the job's id
--         6 data      the delta, encoded
-- From    running
-- To      running, with an answer begun
-- Returns 1, or 0 where the lease belongs to another delivery and nothing was written

local stream, inbox = KEYS[19], KEYS[20]
local consumer, lane, entry, delivery, id, data = unpack(ARGV)

allow_at_maxmemory()
if not holds(stream, entry, delivery, consumer) then return 0 end
local d, a, c, p, flags = past(lane, entry)
if flags == '-' then remember(lane, entry, d, a, c, p, 's') end
redis.call('XADD', inbox, 'MAXLEN', '~', 10000, '*', 't', 'd', 'j', id, 'v', delivery, 'd', data)
redis.call('PEXPIRE', inbox, 600000)
return 1
