-- sweep: reclaim the jobs of one lane whose lease ran out, and give them to whoever is next.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the lane
--         20 back     what waits again there
-- ARGV    1 consumer  the sweeper
--         2 lane      name of the lane
--         3 lease     ms without renewal after which a job is reclaimed
--         4 cursor    where to go on: 0-0 at first
--         5 count     entries to look at, at most (XAUTOCLAIM looks at 10 x as many)
--         6 not_after  Redis' time in ms after which to do nothing: a call that waited in a server that hung rests on a
--                     contact that is broken by now, and may not run before the owners have renewed
-- From    running (by a worker that is gone)
-- To      waiting; running (by the sweeper) for those that it must end
-- Returns the next cursor (0-0: all seen); how many wait again; the jobs for the sweeper to end, in claim's form
--         (dead, interrupted, cancelled); ids of entries that somebody deleted while they were pending
--
-- XAUTOCLAIM first: it is allowed at maxmemory, and then the rest is too.

local stream, back = KEYS[19], KEYS[20]
local consumer, lane, lease, cursor, count, not_after = unpack(ARGV)

local meta, now = meta_of(lane), clock()
-- The sweeper may not have heard yet of a lease that was made longer; who runs the jobs may have, and renews by it.
local told = keep_ms(redis.call('HGET', config, 'lease'), 0)
lease = math.max(tonumber(lease), told <= 3600000 and told or 0) -- an hour is the longest that may be set
if redis.call('EXISTS', stream) == 0 or now > tonumber(not_after) then return {'0-0', 0, {}, {}} end
local found = redis.pcall('XAUTOCLAIM', stream, 'workers', consumer, lease, cursor, 'COUNT', count, 'JUSTID')
if found.err then
  if string.find(found.err, 'WRONGTYPE') then return {'0-0', 0, {}, {}} end -- somebody put another key there
  if not string.find(found.err, 'NOGROUP') then return found end
  redis.call('XGROUP', 'CREATE', stream, 'workers', 0) -- what ran is new again
  arrive(lane, meta, now)
  return {'0-0', 0, {}, {}}
end
local again, to_end = 0, {}
for _, entry in ipairs(found[2]) do
  local _, a, c, p, flags, kept = past(lane, entry)
  local delivery = redis.call('XPENDING', stream, 'workers', entry, entry, 1)[1][4]
  local verdict
  if flags == 'x' or meta and meta.state == 'x' then verdict = 'cancelled'
  elseif flags == 's' then verdict = 'interrupted'
  elseif c >= 2 then verdict = 'dead' end
  remember(lane, entry, delivery, a, c + 1, p, flags, kept)
  settle_start(lane, entry, false)
  if verdict then
    -- A new delivery fences off the attempt that was lost, also where it was the sweeper's own.
    local claimed = redis.call('XCLAIM', stream, 'workers', consumer, 0, entry, 'RETRYCOUNT', delivery + 1)[1]
    if claimed then
      to_end[#to_end + 1] = {lane, entry, delivery + 1, verdict, meta and meta.cls or string.sub(lane, 1, 1),
        meta and meta.tenant or '', a, c + 1, p, claimed[2]}
    end
  else
    wait_again(lane, meta, stream, back, entry, nil, now)
    again = again + 1
  end
end
for _, entry in ipairs(found[3] or {}) do
  redis.call('HDEL', tries, lane .. '|' .. entry)
  redis.call('ZREM', starts, lane .. '|' .. entry)
end
if again > 0 and meta then ring(meta.cls, again) end
return {found[1], again, to_end, found[3] or {}}
