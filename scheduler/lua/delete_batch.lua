-- delete_batch: remove a batch that has ended, with its results.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 batch    the batch's record
--         20 results  the batch's results
-- ARGV    1 id        the batch's id
--         2 lane      name of its lane
-- From    ended
-- To      nothing
-- Returns unknown | open, status (cancel it first) | ok

local batch, results = KEYS[19], KEYS[20]
local id, lane = ARGV[1], ARGV[2]

local status, bytes = unpack(redis.call('HMGET', batch, 'status', 'bytes'))
if redis.call('HEXISTS', lanes, lane) == 1 then return {'open', status} end
redis.call('ZREM', batches, id)
if not status then return {'unknown'} end
redis.call('DEL', batch, results)
if tonumber(bytes or 0) > 0 then
  local total = redis.call('DECRBY', held, bytes)
  if total <= 0 then redis.call('DEL', held) end
  wake_uncollected(total, clock())
end
return {'ok'}
