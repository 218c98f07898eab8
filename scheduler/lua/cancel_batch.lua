-- cancel_batch: no line of the batch starts any more; the reaper ends those that wait, workers abort those that run.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the batch's lane
--         20 back     what waits again there
--         21 batch    the batch's record
--         22 results  the batch's results
-- ARGV    1 lane      name of the batch's lane
-- From    in_progress
-- To      cancelling; cancelled where no line is left
-- Returns unknown | ended, status | cancelling, consumers that run lines of it

local stream, back, batch, results = KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local lane = ARGV[1]

allow_at_maxmemory()
local status, lines, sealed = unpack(redis.call('HMGET', batch, 'status', 'lines', 'sealed'))
if not status then return {'unknown'} end
local meta = meta_of(lane)
if not meta then return {'ended', status} end
local now, consumers = clock(), {}
leave(lane, meta)
set_state(lane, meta, 'x')
redis.call('ZADD', ending, now, lane)
redis.call('HSET', batch, 'status', 'cancelling', 'cancelling_at', now)
if sealed ~= '1' then redis.call('HSET', batch, 'sealed', 1, 'total', lines) end
local pending = redis.pcall('XPENDING', stream, 'workers')
for _, pair in ipairs(not pending.err and pending[4] or {}) do consumers[#consumers + 1] = pair[1] end
if end_batch_when_done(lane, meta, stream, back, batch, results, now) then return {'ended', 'cancelled'} end
return {'cancelling', consumers}
