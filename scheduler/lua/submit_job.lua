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

local NEVER = '9000000000000000' -- as text: Lua takes a microsecond to write a number of this size
local CLOCK_STEP = 10 -- ms; between two commands of one script a clock moves less, unless it is set

local known, known_digest = unpack(redis.call('HMGET', job, 'entry', 'digest'))
if known then return {known_digest and digest ~= '' and known_digest ~= digest and 'differs' or 'exists', known} end
local chat = cls == 'i'
local virtual, cap, queue_ttl =
  unpack(redis.call('HMGET', config, 'virtual', chat and 'cap_interactive' or 'cap_batch', 'queue_ttl'))
cap = finite(cap) or (chat and 10000 or 1000000)
if (finite(redis.call('HGET', counts, cls)) or 0) >= cap then return {'full', cap} end
local now, meta = clock(virtual), meta_of(lane)
ttl = tonumber(ttl) or (chat and (finite(queue_ttl) or 60000) or 0)
local expires = ttl > 0 and string.format('%.0f', now + ttl)

-- XADD is the first write: at maxmemory it is refused before anything has changed.
local entry = redis.call('XADD', stream, '*', 'k', id, 'd', data, 'c', cost, 'x', expires or NEVER, 'r', client)
if not meta then
  redis.call('HSET', lanes, lane, '+' .. cls .. '|' .. tenant .. '|0000000000000')
  redis.pcall('XGROUP', 'CREATE', stream, 'workers', 0) -- it may be there: no error after the XADD
  meta = meta_of(lane)
end
-- The record holds what nothing else says: the lane says class and tenant, and the entry's id when it was queued.
local record = {'HSET', job, 'lane', lane, 'entry', entry, 'client', client}
local function note(name, value) record[#record + 1] = name record[#record + 1] = value end
if expires then note('expires_at', expires) end
if math.abs(string.match(entry, '^%d+') - now) > CLOCK_STEP then note('submitted_at', now) end
if digest ~= '' then note('digest', digest) end
redis.call(unpack(record))
add(counts, cls, 1)
arrive(lane, meta, now)
ring(cls, 1)
return {'ok', entry}
