-- queue: the mechanics that every script begins with; the loader puts this text in front of each of them.
--
-- The first 18 KEYS of every script are the same keys of one queue, in this order (keys.py tells type, content and
-- TTL of each). Nothing here decides which job runs: that is claim.lua alone.

local config, bucket, lanes, ready_i, ready_b, order_i, order_b, asleep, tries, starts, ending, counts,
      held, dead, batches, workers, bell_i, bell_b = unpack(KEYS, 1, 18)
local READY = {i = ready_i, b = ready_b}
local ORDER = {i = order_i, b = order_b}
local BELL = {i = bell_i, b = bell_b}

local WEEK = 7 * 24 * 3600 * 1000
local UNCOLLECTED = 9e15 -- score in `asleep` of a lane whose results wait for a collector: no clock wakes it

-- The one line from which scripts take their time, in ms; a simulation sets config.virtual.
local function clock()
  local virtual = redis.call('HGET', config, 'virtual')
  if virtual then return tonumber(virtual) end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A write that is allowed at maxmemory. Redis refuses commands that use memory only until a script's first write, so
-- a script that begins with this one can complete work, and so free memory, on a server that is full.
local function allow_at_maxmemory()
  redis.call('HDEL', tries, '')
end

-- What is known of a lane: state (+ open, - paused, ! expired, x cancelled), class, tenant, due, member of `order`.
local function meta_of(lane)
  local text = redis.call('HGET', lanes, lane)
  if not text then return nil end
  local state, cls, tenant, due = string.match(text, '^(.)(.)|([^|]*)|(%d+)$')
  return {state = state, cls = cls, tenant = tenant, due = due, member = tenant .. '|' .. due .. '|' .. lane}
end

local function set_state(lane, meta, state)
  meta.state = state
  redis.call('HSET', lanes, lane, state .. meta.cls .. '|' .. meta.tenant .. '|' .. meta.due)
end

-- A lane has something to claim: put it into its tenant's order. A tenant that arrives starts at the least service
-- present, so that it neither owes nor is owed for the time in which it had nothing to run.
local function arrive(lane, meta, now)
  if not meta or meta.state ~= '+' then return end
  local due = tonumber(redis.call('ZSCORE', asleep, lane))
  if due == UNCOLLECTED then return end
  if due then redis.call('ZREM', asleep, lane) end
  if redis.call('ZADD', ORDER[meta.cls], 0, meta.member) == 0 then return end
  local ready = READY[meta.cls]
  if redis.call('ZSCORE', ready, meta.tenant) then return end
  local lowest = redis.call('ZRANGE', ready, 0, 0, 'WITHSCORES')[2]
  if meta.cls == 'b' and not lowest then
    redis.call('HSET', bucket, 'since', now)
    redis.call('PEXPIRE', bucket, WEEK)
  end
  redis.call('ZADD', ready, lowest or 0, meta.tenant)
end

-- A lane has nothing to claim now.
local function leave(lane, meta)
  local order, ready = ORDER[meta.cls], READY[meta.cls]
  redis.call('ZREM', asleep, lane)
  redis.call('ZREM', order, meta.member)
  local others = redis.call('ZRANGEBYLEX', order, '[' .. meta.tenant .. '|', '(' .. meta.tenant .. '}', 'LIMIT', 0, 1)
  if #others == 0 then redis.call('ZREM', ready, meta.tenant) end
  if meta.cls == 'b' and redis.call('EXISTS', ready) == 0 then redis.call('HDEL', bucket, 'since') end
end

-- A lane has something to claim at `due`, and nothing before.
local function sleep_until(lane, meta, due)
  if meta.state ~= '+' or redis.call('ZSCORE', ORDER[meta.cls], meta.member) then return end
  redis.call('ZADD', asleep, 'LT', due, lane)
end

local function remove_lane(lane, meta, stream, back)
  if meta then leave(lane, meta) end
  redis.call('DEL', stream, back)
  redis.call('HDEL', lanes, lane)
  redis.call('ZREM', ending, lane)
end

-- Wake at most `count` workers that listen for a class.
local function ring(cls, count)
  local bell = BELL[cls]
  local missing = math.min(count, 64) - redis.call('LLEN', bell)
  if missing <= 0 then return end
  for _ = 1, missing do redis.call('LPUSH', bell, '1') end
  redis.call('PEXPIRE', bell, 60000)
end

-- The fence: is this entry pending for this consumer and this delivery? A stream that is gone fences everything off.
local function holds(stream, entry, delivery, consumer)
  local pending = redis.pcall('XPENDING', stream, 'workers', entry, entry, 1, consumer)
  return not pending.err and pending[1] ~= nil and pending[1][4] == tonumber(delivery)
end

-- What came before this delivery: last delivery, attempts, crashes, preemptions, flags (s: a delta was sent,
-- x: cancelled). Only entries that came back, sent a delta or were cancelled while running have a record.
local function past(lane, entry)
  local text = redis.call('HGET', tries, lane .. '|' .. entry)
  if not text then return 0, 0, 0, 0, '-' end
  local d, a, c, p, flags = string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%S+)$')
  return tonumber(d), tonumber(a), tonumber(c), tonumber(p), flags
end

local function remember(lane, entry, d, a, c, p, flags)
  redis.call('HSET', tries, lane .. '|' .. entry, string.format('%d %d %d %d %s', d, a, c, p, flags))
end

-- A batch start is known from now on to be left to finish (or not: `kept` false); the deadline counts from kept ones.
local function settle_start(lane, entry, kept)
  local member = lane .. '|' .. entry
  local at = kept and redis.call('ZSCORE', starts, member)
  redis.call('ZREM', starts, member)
  if at and tonumber(at) > tonumber(redis.call('HGET', bucket, 'start') or 0) then
    redis.call('HSET', bucket, 'start', at)
    redis.call('PEXPIRE', bucket, WEEK)
  end
end

-- A claimed entry waits again: acknowledged, so that pending is what runs, but neither deleted nor added anew: it
-- keeps its payload and its place. `due` (ms) is when it may start; nil is at once, before lines not yet started.
local function wait_again(lane, meta, stream, back, entry, due, now)
  redis.call('XACK', stream, 'workers', entry)
  redis.call('ZADD', back, due or string.match(entry, '^%d+'), entry)
  if not meta then return end
  if due and due > now then sleep_until(lane, meta, due) else arrive(lane, meta, now) end
end

-- Every line of a sealed batch has ended: the batch ends, its lane goes, what remains gets its TTL.
local function end_batch_when_done(lane, meta, stream, back, batch, results, now)
  local sealed, total, completed, failed, status =
    unpack(redis.call('HMGET', batch, 'sealed', 'total', 'completed', 'failed', 'status'))
  local done = tonumber(completed or 0) + tonumber(failed or 0)
  if sealed ~= '1' or done < tonumber(total) then return false end
  local last = ({cancelling = 'cancelled', expiring = 'expired'})[status] or 'completed'
  redis.call('HSET', batch, 'status', last, last .. '_at', now, 'ended_at', now)
  remove_lane(lane, meta, stream, back)
  local keep = tonumber(redis.call('HGET', config, 'keep_batch') or WEEK)
  redis.call('PEXPIRE', batch, keep)
  redis.call('PEXPIRE', results, keep)
  redis.call('PEXPIRE', held, keep)
  if redis.call('HLEN', lanes) == 0 then redis.call('PEXPIRE', batches, keep) end
  return true
end

local function uncount(cls, n)
  if redis.call('HINCRBY', counts, cls, -n) <= 0 then redis.call('HDEL', counts, cls) end
end
