-- collect: a collector has written and synced results up to a cursor; trim what every collector has, under pressure.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 batch    the batch's record
--         20 results  the batch's results
-- ARGV    1 name      the collector
--         2 cursor    id of the last result that it has; empty to remove the collector
--         3 lapse     ms of silence after which it is gone for good (a pipe); 0: never, it will go on (a file)
-- From    ended
-- To      ended
-- Returns how many results were trimmed
--
-- Results stay until the batch's TTL while there is room for them (below half of results_max_bytes), so that they can
-- be read again; above that, what has been written elsewhere goes. A batch that holds little since its results are
-- collected goes on, whatever others hold.

local batch, results = KEYS[19], KEYS[20]
local name, cursor, lapse = ARGV[1], ARGV[2], tonumber(ARGV[3])

allow_at_maxmemory()
if redis.call('EXISTS', batch) == 0 then return 0 end
local now = clock()
if cursor == '' then redis.call('HDEL', batch, 'collector:' .. name, 'lapses:' .. name)
else
  redis.call('HSET', batch, 'collector:' .. name, cursor)
  if lapse > 0 then redis.call('HSET', batch, 'lapses:' .. name, now + lapse) end
end

-- One that was killed does not say goodbye, and nobody would ever go on in its name.
local function forget_lapsed()
  local record = redis.call('HGETALL', batch)
  for i = 1, #record, 2 do
    local gone = string.match(record[i], '^lapses:(.*)$')
    if gone and (finite(record[i + 1]) or 0) <= now then
      redis.call('HDEL', batch, record[i], 'collector:' .. gone)
    end
  end
end

-- The place up to which every collector has written; nil where there is none.
local function written_by_all()
  forget_lapsed()
  local slowest, slowest_ms, slowest_seq
  local record = redis.call('HGETALL', batch)
  for i = 1, #record, 2 do
    local ms, seq = string.match(record[i + 1], '^(%d+)-(%d+)$')
    if ms and string.sub(record[i], 1, 10) == 'collector:' then
      ms, seq = tonumber(ms), tonumber(seq)
      if not slowest or ms < slowest_ms or ms == slowest_ms and seq < slowest_seq then
        slowest, slowest_ms, slowest_seq = record[i + 1], ms, seq
      end
    end
  end
  return slowest
end

-- Answers may be 8 MiB each, and every one is copied: few are read at a time, and a call ends at 4 MiB.
local function trim(upto)
  local trimmed, freed, step = 0, 0, 1
  while trimmed < 500 and freed < 2 ^ 22 do
    step = math.min(freed < 2 ^ 16 and 2 * step or step, 128, 500 - trimmed)
    local entries = redis.call('XRANGE', results, '-', upto, 'COUNT', step)
    for _, entry in ipairs(entries) do
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'b' or entry[2][i] == 'd' then freed = freed + #entry[2][i + 1] end
      end
      redis.call('XDEL', results, entry[1])
    end
    trimmed = trimmed + #entries
    if #entries < step then break end
  end
  return trimmed, freed
end

local limit = results_limit()
local total = finite(redis.call('GET', held)) or 0
local upto = total > limit / 2 and written_by_all()
local trimmed, freed = 0, 0
if upto then trimmed, freed = trim(upto) end
if trimmed > 0 then
  add(batch, 'trimmed', trimmed)
  add(batch, 'bytes', -freed)
  total = hold_bytes(-freed)
end
if total > limit and holds_little(batch, limit) then
  local lane = redis.call('HGET', batch, 'lane')
  if tonumber(redis.call('ZSCORE', asleep, lane)) == UNCOLLECTED then wake_lane(lane, now) end
end
wake_uncollected(total, now)
return trimmed
