-- submit_job: put one single job into its tenant's lane.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the lane of the tenant's single jobs of the class
--         20 job      the job's record
-- ARGV    1 id        the job's id: the same id again is the same job
--         2 lane      name of the lane
--         3 cls       i or b
--         4 tenant    whose job it is
--         5 data      the encoded job
--         6 cost      LLM tokens, estimated
--         7 ttl       longest time in the queue, ms; 0 is none; empty is the class's setting
--         8 client    whose inbox is rung
--         9 digest    of what is asked, where the id is one of a key: another digest is another request; may be empty
-- From    nothing
-- To      waiting
-- Returns ok, entry | exists, entry | differs, entry (the id is that of another request) | full, cap

local stream, job = KEYS[19], KEYS[20]
local id, lane, cls, tenant, data, cost, ttl, client, digest = unpack(ARGV)

local known, known_digest = unpack(redis.call('HMGET', job, 'entry', 'digest'))
if known then return {known_digest and digest ~= '' and known_digest ~= digest and 'differs' or 'exists', known} end
local cap = cls == 'i' and setting('cap_interactive', 10000) or setting('cap_batch', 1000000)
if tonumber(redis.call('HGET', counts, cls) or 0) >= cap then return {'full', cap} end
local now = clock()
if ttl == '' then ttl = cls == 'i' and setting('queue_ttl', 60000) or 0 end
local expires = tonumber(ttl) > 0 and now + tonumber(ttl) or 9e15

-- XADD is the first write: at maxmemory it is refused before anything has changed.
local entry = redis.call('XADD', stream, '*', 'k', id, 'd', data, 'c', cost, 'x', expires, 'r', client)
if redis.call('HSETNX', lanes, lane, '+' .. cls .. '|' .. tenant .. '|0000000000000') == 1 then
  redis.pcall('XGROUP', 'CREATE', stream, 'workers', 0) -- it may be there: no error after the XADD
end
redis.call('HSET', job, 'lane', lane, 'entry', entry, 'class', cls, 'tenant', tenant, 'client', client,
  'submitted_at', now, 'expires_at', expires)
if digest ~= '' then redis.call('HSET', job, 'digest', digest) end
redis.call('HINCRBY', counts, cls, 1)
arrive(lane, meta_of(lane), now)
ring(cls, 1)
return {'ok', entry}
