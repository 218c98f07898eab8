-- reap: end the waiting lines of a batch that was cancelled or whose window is over, some at a time.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the batch's lane
--         20 back     what waits again there
--         21 batch    the batch's record
--         22 results  the batch's results
-- ARGV    1 lane      name of the batch's lane
--         2 cursor    entry after which to go on: 0-0 at first
--         3 count     entries to look at, at most
-- From    waiting, delayed
-- To      ended (cancelled, expired)
-- Returns the next cursor (0-0: all seen), how many were ended. Running lines are left to their workers
--
-- Not part of the claim: to skip a million cancelled entries there would block the server for seconds.

local stream, back, batch, results = KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local lane, cursor, count = ARGV[1], ARGV[2], math.min(1000, tonumber(ARGV[3])) -- more would not fit Lua's stack

allow_at_maxmemory()
local meta, now = meta_of(lane), clock()
local due = meta and tonumber(meta.due) or 0
if meta and due > 0 and due <= now and (meta.state == '+' or meta.state == '-') then
  leave(lane, meta)
  set_state(lane, meta, '!')
  redis.call('ZADD', ending, now, lane)
end
if not meta or (meta.state ~= 'x' and meta.state ~= '!') then return {'0-0', 0} end
local cancelled = meta.state == 'x'
local state, code, message = 'expired', 'batch_expired', 'the window of the batch was over before this line started'
if cancelled then state, code, message = 'cancelled', 'batch_cancelled', 'the batch was cancelled' end
if not cancelled then
  local sealed, lines = unpack(redis.call('HMGET', batch, 'sealed', 'lines'))
  redis.call('HSET', batch, 'status', 'expiring')
  if sealed ~= '1' then redis.call('HSET', batch, 'sealed', 1, 'total', lines) end
end
local entries = redis.call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', count)
local reaped, known, bytes = {}, {}, 0
if #entries > 0 then
  local running, first, last = {}, entries[1][1], entries[#entries][1]
  local pending = redis.pcall('XPENDING', stream, 'workers', first, last, #entries)
  for _, row in ipairs(not pending.err and pending or {}) do running[row[1]] = true end
  for _, entry in ipairs(entries) do
    local id, fields = entry[1], entry[2]
    if not running[id] then
      redis.call('XADD', results, '*', 'n', string.match(id, '^%d+'), 'k', fields[2], 's', state, 'e', code,
        'm', message, 'd', fields[4])
      bytes = bytes + #fields[4]
      reaped[#reaped + 1], known[#known + 1] = id, lane .. '|' .. id
    end
  end
end
if #reaped > 0 then
  redis.call('XDEL', stream, unpack(reaped))
  redis.call('ZREM', back, unpack(reaped))
  redis.call('HDEL', tries, unpack(known))
  uncount('b', #reaped)
  redis.call('HINCRBY', batch, 'failed', #reaped)
  redis.call('HINCRBY', batch, 'bytes', bytes)
  redis.call('INCRBY', held, bytes)
  redis.call('PEXPIRE', held, tonumber(redis.call('HGET', config, 'keep_batch') or WEEK))
end
if end_batch_when_done(lane, meta, stream, back, batch, results, now) then return {'0-0', #reaped} end
return {#entries == count and entries[#entries][1] or '0-0', #reaped}
