-- seal_batch: no line comes any more; the batch may complete.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the batch's lane
--         20 back     its entries that wait again
--         21 batch    the batch's record
--         22 results  the batch's results
-- ARGV    1 lane      name of the batch's lane
--         2 next      the line number that the producer would send next: the batch must expect it too
-- From    open
-- To      sealed; completed when all its lines have ended already
-- Returns ok, total | open, next line expected | closed, status

local stream, back, batch, results = KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local lane, next_line = ARGV[1], ARGV[2]

allow_at_maxmemory()
local expected, sealed, status, total = unpack(redis.call('HMGET', batch, 'next', 'sealed', 'status', 'lines'))
if not expected then return {'closed', 'lost'} end
if sealed == '1' then
  if status == 'in_progress' or status == 'completed' then return {'ok', tonumber(total)} end
  return {'closed', status}
end
if expected ~= next_line then return {'open', tonumber(expected)} end
local now = clock()
redis.call('HSET', batch, 'sealed', 1, 'total', total, 'sealed_at', now)
end_batch_when_done(lane, meta_of(lane), stream, back, batch, results, now)
return {'ok', tonumber(total)}
