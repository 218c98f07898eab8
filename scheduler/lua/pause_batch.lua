-- pause_batch: take a batch out of its tenant's order, or put it back in its place.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 batch    the batch's record
-- ARGV    1 lane      name of the batch's lane
--         2 state     - to pause, + to resume
-- From    waiting (running lines go on)
-- To      waiting
-- Returns unknown | ended, status | ok

local batch = KEYS[19]
local lane, state = ARGV[1], ARGV[2]

allow_at_maxmemory()
local status = redis.call('HGET', batch, 'status')
if not status then return {'unknown'} end
local meta = meta_of(lane)
if not meta or meta.state == 'x' or meta.state == '!' then return {'ended', status} end
if state == '-' then
  leave(lane, meta)
  set_state(lane, meta, '-')
  redis.call('HSET', batch, 'paused_at', clock())
else
  set_state(lane, meta, '+')
  redis.call('HDEL', batch, 'paused_at')
  arrive(lane, meta, clock())
  ring('b', 8)
end
return {'ok'}
