-- open_batch: make a batch that lines can be submitted to.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 batch    the batch's record
-- ARGV    1 id        the batch's id: the same id again is the same batch
--         2 lane      name of its lane
--         3 tenant    whose batch it is
--         4 window    ms from now until which its lines may start; 0 is none
--         5 lines     lines that must have room now; 0 where the producer will wait for room
--         6.. field, value  what else the record holds (name, digest, endpoint, metadata, ...)
-- From    nothing
-- To      open, without lines
-- Returns ok, next line | exists, next line | full, cap

local batch = KEYS[19]
local id, lane, tenant, window, lines = unpack(ARGV, 1, 5)

local known = redis.call('HGET', batch, 'next')
if known then return {'exists', known} end
local cap = setting('cap_batch', 1000000)
local need = tonumber(lines)
if need > 0 and (finite(redis.call('HGET', counts, 'b')) or 0) + need > cap then return {'full', cap} end
local now = clock()
-- A batch without a window is due ten years after it came: behind every batch that has one, in order of arrival.
local due = tonumber(window) > 0 and now + tonumber(window) or now + 520 * WEEK
redis.call('HSET', batch, 'id', id, 'lane', lane, 'tenant', tenant, 'status', 'in_progress', 'created_at', now,
  'next', 1, 'lines', 0, 'completed', 0, 'failed', 0, 'sealed', 0)
if tonumber(window) > 0 then redis.call('HSET', batch, 'expires_at', due) end
if #ARGV > 5 then redis.call('HSET', batch, unpack(ARGV, 6)) end
redis.call('HSET', lanes, lane, '+b|' .. tenant .. '|' .. string.format('%013.0f', due))
redis.call('ZADD', batches, now, id)
redis.call('PERSIST', batches)
return {'ok', 1}
