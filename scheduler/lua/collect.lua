-- collect: a collector has written and synced results up to a cursor; trim what every collector has, under pressure.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 batch    the batch's record
--         20 results  the batch's results
-- ARGV    1 name      the collector
--         2 cursor    id of the last result that it has; empty to remove the collector
-- From    ended
-- To      ended
-- Returns how many results were trimmed
--
-- Results stay until the batch's TTL while there is room for them (below half of results_max_bytes), so that they can
-- be read again; above that, what has been written elsewhere goes.

local batch, results = KEYS[19], KEYS[20]
local name, cursor = ARGV[1], ARGV[2]

allow_at_maxmemory()
if redis.call('EXISTS', batch) == 0 then return 0 end
if cursor == '' then redis.call('HDEL', batch, 'collector:' .. name)
else redis.call('HSET', batch, 'collector:' .. name, cursor) end

local limit = tonumber(redis.call('HGET', config, 'results_max_bytes') or 2 ^ 30)
local total = tonumber(redis.call('GET', held) or 0)
local trimmed, freed = 0, 0
if total > limit / 2 then
  local function number_of(id)
    local ms, seq = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(ms), tonumber(seq)
  end
  local slowest
  local record = redis.call('HGETALL', batch)
  for i = 1, #record, 2 do
    if string.sub(record[i], 1, 10) == 'collector:' then
      local at, best = record[i + 1], slowest
      if not best then slowest = at else
        local a, b = number_of(at)
        local c, d = number_of(best)
        if a < c or a == c and b < d then slowest = at end
      end
    end
  end
  if slowest then
    for _, entry in ipairs(redis.call('XRANGE', results, '-', slowest, 'COUNT', 500)) do
      for i = 1, #entry[2], 2 do
        if entry[2][i] == 'b' or entry[2][i] == 'd' then freed = freed + #entry[2][i + 1] end
      end
      redis.call('XDEL', results, entry[1])
      trimmed = trimmed + 1
    end
  end
  if trimmed > 0 then
    redis.call('HINCRBY', batch, 'trimmed', trimmed)
    redis.call('HINCRBY', batch, 'bytes', -freed)
    total = redis.call('DECRBY', held, freed)
  end
end
wake_uncollected(total, clock())
return trimmed
