-- queue: the mechanics that scripts share; the loader puts what a script uses of this text in front of it.
--
-- The first 18 KEYS of every script are the same keys of one queue, in this order (keys.py tells type, content and
-- TTL of each). Nothing here decides which job runs: that is claim.lua alone. Each statement at the left margin begins
-- with `local`: that is how the loader (scripts/call.py) tells one from the next.

local config, bucket, lanes, ready_i, ready_b, order_i, order_b, asleep, tries, starts, ending, counts,
      held, dead, batches, workers, bell_i, bell_b = unpack(KEYS, 1, 18)
local READY = {i = ready_i, b = ready_b}
local ORDER = {i = order_i, b = order_b}
local BELL = {i = bell_i, b = bell_b}

local WEEK = 7 * 24 * 3600 * 1000
local UNCOLLECTED = 9e15 -- score in `asleep` of a lane whose results wait for a collector: no clock wakes it

-- A number that somebody can mean. What is none (nor NaN or an infinity) was written by hand, and counts for nothing.
local function finite(text)
  local number = tonumber(text)
  if number and number > -1e300 and number < 1e300 then return number end
end

-- The one place from which scripts take their time, in ms; a simulation sets config.virtual.
local function clock(virtual)
  if virtual == nil then virtual = redis.call('HGET', config, 'virtual') end
  virtual = virtual and finite(virtual)
  if virtual then return virtual end
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A live setting that is a number (live.py says the same of what is none).
local function setting(name, default)
  return finite(redis.call('HGET', config, name)) or default
end

-- A time in ms for which something is kept: PEXPIRE refuses others, in the middle of a script.
local function keep_ms(text, default)
  local ms = finite(text)
  return ms and ms >= 1 and ms <= 1e12 and ms % 1 == 0 and ms or default
end

-- A tenant's weight, within what `llmq set` takes: it divides.
local function weight_of(tenant)
  local weight = setting('weight.' .. tenant, 1)
  return weight >= 0.001 and weight <= 1000 and weight or 1
end

-- Add to a count of a hash. One that is no whole number begins anew: an error here would end a script in its middle.
local function add(hash, field, count)
  local sum = redis.pcall('HINCRBY', hash, field, count)
  if type(sum) == 'number' then return sum end
  redis.call('HSET', hash, field, count)
  return tonumber(count)
end

-- Add to the bytes of results that are held; the same.
local function hold_bytes(bytes)
  local sum = redis.pcall('INCRBY', held, bytes)
  if type(sum) == 'number' then return sum end
  redis.call('SET', held, math.max(0, bytes))
  return math.max(0, bytes)
end

-- Could llmq have given this name? It is text in UTF-8, without control characters. Others would not come back from
-- Python as they went there.
local function is_name(text)
  if string.find(text, '%c') then return false end
  if not string.find(text, '[\128-\255]') then return true end
  for _, letter in ipairs({'[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]',
      '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
      '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]',
      '\244[\128-\143][\128-\191][\128-\191]'}) do
    text = string.gsub(text, letter, '?')
  end
  return not string.find(text, '[\128-\255]')
end

-- The settings that hold now. The plan ("from rate burst unit;" a change, in order) is kept a week ahead by the
-- sweeper; its last change that has begun is in force. A rate there is a number, `off`, `-` (as set) or `closed`.
local function settings()
  local virtual, rate, burst, unit, plan, paused_i, paused_b, deadline, yields = unpack(redis.call('HMGET', config,
    'virtual', 'rate', 'burst', 'unit', 'plan', 'paused_i', 'paused_b', 'deadline', 'yields_b'))
  local now = clock(virtual)
  local s = {now = now, paused_i = paused_i, paused_b = paused_b, deadline = finite(deadline) or 30000,
    open = true, opened = 0, change = nil, yields = finite(yields) or 0} -- until then batch starts by the deadline only
  local r, b, u = rate, burst, unit
  for from, rate_then, burst_then, unit_then in string.gmatch(plan or '', '(%d+) (%S+) (%S+) (%S+);') do
    from = tonumber(from)
    if from > now then s.change = from break end
    local open = rate_then ~= 'closed'
    if open and not s.open then s.opened = from end
    s.open = open
    if open and rate_then ~= '-' then r, b, u = rate_then, burst_then, unit_then else r, b, u = rate, burst, unit end
  end
  s.rate = finite(r) -- nil: unlimited
  if s.rate and s.rate <= 0 then s.rate = nil end
  s.burst = s.rate and (finite(b) or math.max(1, s.rate))
  s.unit = u == 'tok' and 'tok' or 'job'
  return s
end

-- The bucket, refilled: time is Redis', elapsed is never negative, and the last refill never goes back.
local function refilled(s)
  local tokens, at, start, since, dry, unit =
    unpack(redis.call('HMGET', bucket, 'tokens', 'at', 'start', 'since', 'dry', 'unit'))
  local b = {at = finite(at) or s.now, dry = finite(dry), last = math.max(finite(start) or 0, finite(since) or 0)}
  if s.rate then
    local level = finite(tokens) or s.burst
    -- It counts another unit now: one long line's debt of LLM tokens would be so many jobs, hours of them.
    if unit and unit ~= s.unit then level = math.max(0, level) end
    b.tokens, b.unit = math.min(s.burst, level + math.max(0, s.now - b.at) * s.rate / 1000), s.unit
  end
  return b
end

-- Write what a claim left in the bucket, and how long nothing could start before.
local function save_bucket(b, now)
  if b.tokens then redis.call('HSET', bucket, 'tokens', b.tokens, 'unit', b.unit, 'at', math.max(b.at, now)) end
  if b.dry then
    add(bucket, 'exhausted', 1)
    add(bucket, 'dry_ms', math.floor(math.max(0, now - b.dry)))
    redis.call('HDEL', bucket, 'dry')
  end
  redis.call('PEXPIRE', bucket, WEEK)
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
  local state, cls, tenant, due = string.match(text, '^([-+!x])([ib])|([^|]*)|(%d+)$')
  if not state or #due > 15 then return nil end -- llmq did not write it
  return {state = state, cls = cls, tenant = tenant, due = due, member = tenant .. '|' .. due .. '|' .. lane}
end

local function set_state(lane, meta, state)
  meta.state = state
  redis.call('HSET', lanes, lane, state .. meta.cls .. '|' .. meta.tenant .. '|' .. meta.due)
end

-- A little less than what an ordinary job adds to its tenant's service: one in chat; in batch LLM tokens, 256 where a
-- short line does not limit its answer.
local ALMOST_A_TURN = {i = 0.99, b = 250}

-- A lane has something to claim: put it into its tenant's order. A tenant that arrives starts almost a turn behind the
-- least service present: it is neither owed nor owing for the time in which it had nothing to run, and comes after those
-- that wait for this turn. Level with these, who comes and goes with each job (most chat tenants never have two that
-- wait) would go first for ever, or never, by its name.
local function arrive(lane, meta, now)
  if not meta or meta.state ~= '+' then return end
  local due = tonumber(redis.call('ZSCORE', asleep, lane))
  if due == UNCOLLECTED then return end
  if due then redis.call('ZREM', asleep, lane) end
  if redis.call('ZADD', ORDER[meta.cls], 0, meta.member) == 0 then return end
  local ready = READY[meta.cls]
  if redis.call('ZSCORE', ready, meta.tenant) then return end
  local lowest = redis.call('ZRANGE', ready, 0, 0, 'WITHSCORES')[2]
  if meta.cls == 'b' then
    redis.call('HSET', bucket, 'came:' .. meta.tenant, now)
    if not lowest then redis.call('HSET', bucket, 'since', now) end
    redis.call('PEXPIRE', bucket, WEEK)
  end
  local behind = lowest and ALMOST_A_TURN[meta.cls] / weight_of(meta.tenant) or 0
  redis.call('ZADD', ready, (lowest or 0) + behind, meta.tenant)
end

-- A lane has nothing to claim now.
local function leave(lane, meta)
  local order, ready = ORDER[meta.cls], READY[meta.cls]
  redis.call('ZREM', asleep, lane)
  redis.call('ZREM', order, meta.member)
  local others = redis.call('ZRANGEBYLEX', order, '[' .. meta.tenant .. '|', '(' .. meta.tenant .. '}', 'LIMIT', 0, 1)
  if #others > 0 then return end
  redis.call('ZREM', ready, meta.tenant)
  if meta.cls == 'i' then return end
  redis.call('HDEL', bucket, 'came:' .. meta.tenant)
  if redis.call('EXISTS', ready) == 0 then redis.call('HDEL', bucket, 'since', 'dry') end
end

-- Wake lanes that sleep no longer, 16 at most; returns when the next one is due.
local function wake_sleepers(now)
  local sleepers = redis.call('ZRANGE', asleep, 0, 15, 'WITHSCORES')
  for i = 1, #sleepers, 2 do
    local lane, due = sleepers[i], tonumber(sleepers[i + 1])
    if due > now then return due end
    redis.call('ZREM', asleep, lane)
    arrive(lane, meta_of(lane), now)
  end
end

-- A lane has something to claim at `due`, and nothing before.
local function sleep_until(lane, meta, due)
  if meta.state ~= '+' or redis.call('ZSCORE', ORDER[meta.cls], meta.member) then return end
  local at = tonumber(redis.call('ZSCORE', asleep, lane))
  if at == UNCOLLECTED or at and at <= due then return end
  redis.call('ZADD', asleep, due, lane)
end

-- Call a command on a lane's group. Where somebody deleted the group, it is made again, at 0 (F-056); where the stream
-- is gone, and where XREADGROUP finds nothing (`false` on a server), the answer is empty.
local function in_group(stream, ...)
  local reply = redis.pcall(...)
  if not reply then return {} end
  if not reply.err then return reply end
  if not string.find(reply.err, 'NOGROUP', 1, true) then return redis.call(...) end
  if redis.call('EXISTS', stream) == 0 then return {} end
  redis.call('XGROUP', 'CREATE', stream, 'workers', 0)
  return redis.call(...) or {}
end

-- Take an entry that waits again. Nil where it was deleted, or where it is pending, so somebody runs it: XCLAIM FORCE
-- would steal it.
local function claim_again(stream, back, consumer, entry, delivery)
  redis.call('ZREM', back, entry)
  local ms, number = string.match(entry, '^(%d+)-(%d+)$')
  if not ms or #ms > 19 or #number > 19 then return nil end -- no id of an entry
  if #in_group(stream, 'XPENDING', stream, 'workers', entry, entry, 1) > 0 then return nil end
  return in_group(stream, 'XCLAIM', stream, 'workers', consumer, 0, entry, 'FORCE', 'RETRYCOUNT', delivery)[1]
end

-- Take up to `count` entries that the group has never delivered.
local function claim_new(stream, consumer, count)
  local read = in_group(stream, 'XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', count, 'STREAMS', stream, '>')[1]
  return read and read[2] or {}
end

-- Does a lane hold entries that its group has never delivered? `last` is the last one delivered, where that is known.
local function has_new(stream, last)
  if not last then
    local groups = redis.pcall('XINFO', 'GROUPS', stream)
    for _, group in ipairs(groups.err and {} or groups) do
      if group[2] == 'workers' then last = group[8] end
    end
  end
  return #redis.call('XRANGE', stream, '(' .. (last or '0-0'), '+', 'COUNT', 1) > 0
end

-- Nothing new waits in a lane. Unless something is due there, it leaves at once, so that `since` is always the moment
-- at which batch began to wait, and sleeps until the next entry is due; returns that moment.
local function leave_when_drained(lane, meta, back, now)
  local due = tonumber(redis.call('ZRANGE', back, 0, 0, 'WITHSCORES')[2])
  if due and due <= now then return end
  leave(lane, meta)
  if due then sleep_until(lane, meta, due) end
  return due
end

local function remove_lane(lane, meta, stream, back)
  if meta then leave(lane, meta) end
  redis.call('DEL', stream, back)
  redis.call('HDEL', lanes, lane)
  redis.call('ZREM', ending, lane)
  if redis.call('HLEN', lanes) == 0 then
    redis.call('PEXPIRE', batches, keep_ms(redis.call('HGET', config, 'keep_batch'), WEEK))
  end
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
-- x: cancelled), and what is kept of an answer that was cut off ('' for nothing). Only entries that came back, sent a
-- delta or were cancelled while running have a record.
local function past(lane, entry)
  local text = redis.call('HGET', tries, lane .. '|' .. entry)
  if not text then return 0, 0, 0, 0, '-', '' end
  local d, a, c, p, flags, kept = string.match(text, '^(%d+) (%d+) (%d+) (%d+) (%S+) ?(.*)$')
  if not d or math.max(#d, #a, #c, #p) > 9 then return 0, 0, 0, 0, '-', '' end -- llmq did not write it
  return tonumber(d), tonumber(a), tonumber(c), tonumber(p), flags, kept
end

local function remember(lane, entry, d, a, c, p, flags, kept)
  local counts_and_flags = string.format('%d %d %d %d %s', d, a, c, p, flags)
  if kept and kept ~= '' then counts_and_flags = counts_and_flags .. ' ' .. kept end
  redis.call('HSET', tries, lane .. '|' .. entry, counts_and_flags)
end

-- A batch start is known from now on to be left to finish (or not: `kept` false); the deadline counts from kept ones.
-- Returns when it was.
local function settle_start(lane, entry, kept)
  local member = lane .. '|' .. entry
  local at = redis.call('ZSCORE', starts, member)
  redis.call('ZREM', starts, member)
  at = at and math.abs(tonumber(at)) -- negative: it could be preempted
  if kept and at and at > (finite(redis.call('HGET', bucket, 'start')) or 0) then
    if redis.call('HSET', bucket, 'start', at) == 1 then redis.call('PEXPIRE', bucket, WEEK) end
  end
  return at
end

-- LLM tokens, estimated; an entry that llmq did not write may say anything, and its worker ends it.
local function cost_of(fields)
  return math.max(0, math.min(finite(fields[6]) or 1, 1e9))
end

-- Was a batch start charged to the service that its tenant has now? A tenant that has had nothing to claim since begins
-- anew. To correct that service by what was charged to the one before would let it go before all others for long.
local arrivals = {} -- of tenants, as this script has read them
local function is_charged(tenant, at, now)
  if not at then return false end
  local came = arrivals[tenant]
  if came == nil then
    came = finite(redis.call('HGET', bucket, 'came:' .. tenant)) or false
    arrivals[tenant] = came
  end
  return came and (at >= came or came > now) -- later than now: the clock was set back
end

-- A claimed entry waits again: acknowledged, so that pending is what runs, but neither deleted nor added anew: it
-- keeps its payload and its place. `due` (ms) is when it may start; nil is at once, before lines not yet started.
local function wait_again(lane, meta, stream, back, entry, due, now)
  redis.call('XACK', stream, 'workers', entry)
  -- The id of a single job is a time, which may be ahead of a clock that was set back: 0 then, ids order themselves.
  local place = tonumber(string.match(entry, '^%d+'))
  local score = due or place < 1e11 and place or 0
  if type(redis.pcall('ZADD', back, score, entry)) ~= 'number' then -- somebody put another type of key there
    redis.call('DEL', back)
    redis.call('ZADD', back, score, entry)
  end
  if not meta then return end
  if due and due > now then sleep_until(lane, meta, due) else arrive(lane, meta, now) end
end

-- Every line of a sealed batch has ended: the batch ends, its lane goes, what remains gets its TTL.
local function end_batch_when_done(lane, meta, stream, back, batch, results, now)
  local sealed, total, completed, failed, status =
    unpack(redis.call('HMGET', batch, 'sealed', 'total', 'completed', 'failed', 'status'))
  local done = (finite(completed) or 0) + (finite(failed) or 0)
  if not status then -- lines that somebody added by hand, to a batch that there is not: they leave nothing for ever
    local keep = keep_ms(redis.call('HGET', config, 'keep_batch'), WEEK)
    redis.call('PEXPIRE', batch, keep)
    redis.call('PEXPIRE', results, keep)
    local last = redis.call('XLEN', stream) == 0
    if last then remove_lane(lane, meta, stream, back) end
    return true
  end
  if sealed ~= '1' or done < (finite(total) or math.huge) then return false end
  -- A line that somebody added by hand was counted, too: the batch ends with the last of its own.
  if redis.call('XLEN', stream) > 0 then return false end
  local last = ({cancelling = 'cancelled', expiring = 'expired'})[status] or 'completed'
  redis.call('HSET', batch, 'status', last, last .. '_at', now, 'ended_at', now)
  remove_lane(lane, meta, stream, back)
  local keep = keep_ms(redis.call('HGET', config, 'keep_batch'), WEEK)
  redis.call('PEXPIRE', batch, keep)
  redis.call('PEXPIRE', results, keep)
  redis.call('PEXPIRE', held, keep)
  return true
end

-- How many bytes of results may be held: as set, else a quarter of maxmemory (lead.lua), 1 GiB where there is none.
local function results_limit()
  local set, quarter = unpack(redis.call('HMGET', config, 'results_max_bytes', 'results_quarter'))
  return finite(set) or finite(quarter) or 2 ^ 30
end

-- Above the limit, a batch whose own results are collected and gone does not wait for what other batches hold.
local function holds_little(batch, limit)
  local bytes, trimmed = unpack(redis.call('HMGET', batch, 'bytes', 'trimmed'))
  return trimmed and (finite(bytes) or 0) <= limit / 64
end

local function wake_lane(lane, now)
  redis.call('ZREM', asleep, lane)
  arrive(lane, meta_of(lane), now)
  ring('b', 8)
end

-- Wake the lanes whose results waited for a collector, as soon as there is room for more; `total` bytes are held.
local function wake_uncollected(total, now)
  if total > results_limit() then return end
  for _, lane in ipairs(redis.call('ZRANGEBYSCORE', asleep, UNCOLLECTED, UNCOLLECTED, 'LIMIT', 0, 16)) do
    wake_lane(lane, now)
  end
end

local function uncount(cls, n)
  if add(counts, cls, -n) <= 0 then redis.call('HDEL', counts, cls) end
end
