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
local lane, cursor, count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local MAX_BYTES = 2 ^ 20

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
-- Lines may be 1 MiB each, and every one is copied: few are read at a time, and a call ends at about a chunk's bytes.
local reaped, bytes, looked, step, more = 0, 0, 0, 1, true
while more and looked < count and bytes < MAX_BYTES do
  step = math.min(bytes < 2 ^ 16 and 2 * step or step, 128, count - looked)
  local entries = redis.call('XRANGE', stream, '(' .. cursor, '+', 'COUNT', step)
  local running, ended, known = {}, {}, {}
  local first, last = entries[1] and entries[1][1], entries[#entries] and entries[#entries][1]
  local pending = first and redis.pcall('XPENDING', stream, 'workers', first, last, #entries) or {}
  for _, row in ipairs(not pending.err and pending or {}) do running[row[1]] = true end
  for _, entry in ipairs(entries) do
    local id, key, data = entry[1], entry[2][2] or entry[1], entry[2][4] or '' -- llmq may not have written it
    if not running[id] then
      redis.call('XADD', results, '*', 'n', string.match(id, '^%d+'), 'k', key, 's', state, 'e', code,
        'm', message, 'd', data)
      bytes = bytes + #data
      ended[#ended + 1], known[#known + 1] = id, lane .. '|' .. id
    end
  end
  if #ended > 0 then
    redis.call('XDEL', stream, unpack(ended))
    redis.call('ZREM', back, unpack(ended))
    redis.call('HDEL', tries, unpack(known))
  end
  reaped, looked, cursor, more = reaped + #ended, looked + #entries, last or cursor, #entries == step
end
if reaped > 0 then
  uncount('b', reaped)
  add(batch, 'failed', reaped)
  add(batch, 'bytes', bytes)
  hold_bytes(bytes)
  redis.call('PEXPIRE', held, keep_ms(redis.call('HGET', config, 'keep_batch'), WEEK))
end
if end_batch_when_done(lane, meta, stream, back, batch, results, now) then return {'0-0', reaped} end
return {more and cursor or '0-0', reaped}
