-- claim: take the next jobs for one worker. The one place where the policy lives.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19.. lane, back  one pair a candidate lane, at most 8
-- ARGV    1 consumer  who claims
--         2 room      free slots, and slots whose batch request may be preempted
--         3 free      free slots
--         4 reserve   slots kept free for chat
--         5 suspects  suspects that the worker runs now
--         6.. name    the candidate lanes, in the order of KEYS
-- From    waiting, delayed (due)
-- To      running
-- Returns jobs {lane, entry, delivery, why, class, tenant, attempts, crashes, preemptions, fields}; entries for the
--         worker to end, in the same form (expired, cancelled: at most 64, outside the room); the reason why no more
--         were given; ms to the next moment at which that may change; the candidate lanes to give next time, where
--         those given were not the right ones
--
-- Cost: the same at 10 jobs waiting and at 10 million. Bounds: 8 lanes, 16 entries of back at a time, room jobs.

local consumer, room, free, reserve, suspects =
  ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local given = {}
for i = 6, #ARGV do given[ARGV[i]] = {stream = KEYS[7 + 2 * i], back = KEYS[8 + 2 * i]} end

local now = clock()
local paused_i, paused_b, rate, burst, unit, deadline, plan =
  unpack(redis.call('HMGET', config, 'paused_i', 'paused_b', 'rate', 'burst', 'unit', 'deadline', 'plan'))
local jobs, ended, skip, missing, soonest = {}, {}, {}, false, now + 1000
deadline = tonumber(deadline or 30000)

local function look_again_at(moment)
  if moment > now and moment < soonest then soonest = moment end
end

-- Windows: "from rate burst unit;" a change, a week ahead; the last one that has begun is in force.
local open, opened = true, 0
for from, r, b, u in string.gmatch(plan or '', '(%d+) (%S+) (%S+) (%S+);') do
  from = tonumber(from)
  look_again_at(from)
  if from <= now then
    if r == 'closed' then open = false else
      if not open then opened = from end
      open = true
      if r ~= '-' then rate, burst, unit = r ~= 'off' and r, b, u end
    end
  end
end
rate, burst = tonumber(rate), tonumber(burst)

-- 1. Wake the lanes that sleep no longer.
local sleeper = redis.call('ZRANGE', asleep, 0, 0, 'WITHSCORES')
if sleeper[1] and tonumber(sleeper[2]) <= now then
  for _, lane in ipairs(redis.call('ZRANGEBYSCORE', asleep, '-inf', now, 'LIMIT', 0, 16)) do
    redis.call('ZREM', asleep, lane)
    arrive(lane, meta_of(lane), now)
  end
  sleeper = redis.call('ZRANGE', asleep, 0, 0, 'WITHSCORES')
end
if sleeper[2] then look_again_at(tonumber(sleeper[2])) end

-- The next lane of a class: of the tenant with the least service, the one that is due first.
local function next_lane(cls)
  for _, tenant in ipairs(redis.call('ZRANGE', READY[cls], 0, 7)) do
    local range = {'[' .. tenant .. '|', '(' .. tenant .. '}'}
    for _, member in ipairs(redis.call('ZRANGEBYLEX', ORDER[cls], range[1], range[2], 'LIMIT', 0, 8)) do
      local due, lane = string.match(member, '^[^|]*|(%d+)|(.*)$')
      if not skip[lane] then return lane, tenant, tonumber(due), member end
    end
  end
end

-- Take up to `want` jobs of a lane: those that wait again first, then new ones. Returns how many were started.
local function take(lane, tenant, cls, want, why)
  local stream, back, started, held_back = given[lane].stream, given[lane].back, 0, false
  local function start(entry, delivery, a, c, p, flags)
    local fields = entry[2]
    local expired = fields[8] and tonumber(fields[8]) <= now
    local verdict = flags == 'x' and 'cancelled' or expired and 'expired'
    local row = {lane, entry[1], delivery, verdict or why, cls, tenant, a, c, p, fields}
    if verdict then ended[#ended + 1] = row return end
    if c > 0 then suspects = suspects + 1 end
    jobs[#jobs + 1] = row
    started = started + 1
  end
  local full, taken
  repeat
    local waiting = redis.call('ZRANGEBYSCORE', back, '-inf', now, 'LIMIT', 0, 16)
    full, taken = #waiting == 16, 0
    for _, id in ipairs(waiting) do
      if started == want then return started end
      local d, a, c, p, flags = past(lane, id)
      if c > 0 and suspects > 0 then held_back = true
      else
        -- Pending already means that somebody runs it: XCLAIM FORCE would steal it.
        local idle = #redis.call('XPENDING', stream, 'workers', id, id, 1) == 0
        local entry = idle and redis.call('XCLAIM', stream, 'workers', consumer, 0, id, 'FORCE', 'RETRYCOUNT', d + 1)[1]
        redis.call('ZREM', back, id)
        if entry then start(entry, d + 1, a, c, p, flags) end
        taken = taken + 1
      end
    end
  until not full or taken == 0
  local exhausted, last = false, nil
  while started < want and #ended < 64 and not exhausted do
    local n = want - started
    local reply = redis.pcall('XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', n, 'STREAMS', stream, '>')
    if reply and reply.err then -- the group is gone (somebody deleted it): make it again, once
      if redis.call('EXISTS', stream) == 0 then exhausted = true break end
      redis.call('XGROUP', 'CREATE', stream, 'workers', 0)
      reply = redis.call('XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', n, 'STREAMS', stream, '>')
    end
    local entries = reply and reply[1] and reply[1][2] or {} -- nothing new is `false` on a server, a table on fakes
    for _, entry in ipairs(entries) do
      start(entry, 1, 0, 0, 0, '-')
      last = entry[1]
    end
    exhausted = #entries < n
  end
  if last and not exhausted then exhausted = #redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1) == 0 end
  if exhausted and held_back then skip[lane] = true
  elseif exhausted then
    local later = redis.call('ZRANGE', back, 0, 0, 'WITHSCORES')[2]
    if not later or tonumber(later) > now then
      local meta = meta_of(lane)
      if meta then leave(lane, meta) end
      if meta and later then sleep_until(lane, meta, tonumber(later)) look_again_at(tonumber(later)) end
    end
  end
  return started
end

-- Start up to `want` jobs of the class's next lane that has any; the cost of each goes to its tenant's service.
local function serve(cls, want, why)
  for _ = 1, 8 do
    local lane, tenant, due, member = next_lane(cls)
    if not lane then return 0 end
    if due > 0 and due <= now then -- the batch's window is over: the sweeper ends what has not started
      local meta = meta_of(lane)
      if meta then leave(lane, meta) set_state(lane, meta, '!') redis.call('ZADD', ending, now, lane)
      else redis.call('ZREM', ORDER[cls], member) end
    elseif not given[lane] then missing = true return 0
    else
      local first = #jobs
      local n = take(lane, tenant, cls, want, why)
      if n > 0 then
        local cost = 0
        for i = first + 1, #jobs do cost = cost + (cls == 'i' and 1 or tonumber(jobs[i][10][6])) end
        local weight = tonumber(redis.call('HGET', config, 'weight.' .. tenant) or 1)
        redis.call('ZADD', READY[cls], 'XX', 'INCR', cost / weight, tenant)
        return n
      end
    end
  end
  return 0
end

-- The bucket, refilled: time is Redis', elapsed is never negative, the last refill never goes back.
local tokens, at, start, since, dry = unpack(redis.call('HMGET', bucket, 'tokens', 'at', 'start', 'since', 'dry'))
at = tonumber(at or now)
if rate then
  local refilled = math.max(0, now - at) * rate / 1000
  tokens = math.min(burst, tonumber(tokens or burst) + refilled)
end
local spent, batch_from = false, nil
local function pay(from, as_debt)
  for i = from, #jobs do
    redis.call('ZADD', starts, now, jobs[i][1] .. '|' .. jobs[i][2])
    local cost = unit == 'tok' and tonumber(jobs[i][10][6]) or 1
    if rate and as_debt then tokens = math.max(math.min(tokens, -burst), tokens - cost)
    elseif rate then tokens = tokens - cost end
  end
  spent = true
end

local batch_waits = redis.call('EXISTS', ready_b) == 1
local may_batch = batch_waits and not paused_b and open

-- 2. The deadline: batch always makes progress, whatever chat waits and however empty the bucket is.
if may_batch and room > 0 then
  local newest = redis.call('ZREVRANGE', starts, 0, 0, 'WITHSCORES')[2]
  local due = math.max(tonumber(start or 0), tonumber(newest or 0), tonumber(since or 0), opened) + deadline
  if due <= now and serve('b', 1, 'deadline') == 1 then pay(1, true) end
  look_again_at(due)
end

-- 3. Interactive, up to the room: tenants in turn.
local chat = 0
while not paused_i and not missing and chat + (spent and 1 or 0) < room do
  local alone = redis.call('ZCARD', ready_i) == 1
  local n = serve('i', alone and room - chat - (spent and 1 or 0) or 1, 'chat')
  if n == 0 then break end
  chat = chat + n
end

-- 4. Batch, only if nothing interactive is claimable: above the reserve, and as the bucket allows.
local reason = 'empty'
local quota = free - #jobs - reserve
if may_batch and not missing then
  if quota <= 0 then reason = 'busy' end
  while quota > 0 do
    if rate and tokens < 1 then
      reason = 'bucket'
      look_again_at(now + math.ceil((1 - tokens) * 1000 / rate))
      break
    end
    local before = #jobs
    local alone = redis.call('ZCARD', ready_b) == 1 and unit ~= 'tok'
    local n = serve('b', alone and math.min(quota, rate and math.floor(tokens) or quota) or 1, 'bucket')
    if n == 0 then break end
    pay(before + 1, false)
    quota = quota - n
    if quota <= 0 then reason = 'busy' end
  end
elseif batch_waits and not missing then reason = paused_b and 'paused' or 'window' end

if spent then
  if rate then redis.call('HSET', bucket, 'tokens', tokens, 'at', math.max(at, now)) end
  if dry then
    redis.call('HINCRBY', bucket, 'exhausted', 1)
    redis.call('HINCRBY', bucket, 'dry_ms', math.max(0, now - dry))
    redis.call('HDEL', bucket, 'dry')
  end
  redis.call('PEXPIRE', bucket, WEEK)
elseif reason == 'bucket' and not dry then
  redis.pcall('HSET', bucket, 'dry', now) -- only a figure: at maxmemory it may be refused
end

-- 5. The room is filled and more may wait: pass the ring on.
if chat > 0 and chat + (spent and #jobs - chat or 0) >= room and redis.call('EXISTS', ready_i) == 1 then ring('i', 1) end
if spent and reason == 'busy' and redis.call('EXISTS', ready_b) == 1 then ring('b', 1) end

local wanted = {}
if missing then
  reason = 'lanes'
  skip = {}
  for _, cls in ipairs({'i', 'b'}) do
    for _, tenant in ipairs(redis.call('ZRANGE', READY[cls], 0, 7)) do
      local range = {'[' .. tenant .. '|', '(' .. tenant .. '}'}
      for _, member in ipairs(redis.call('ZRANGEBYLEX', ORDER[cls], range[1], range[2], 'LIMIT', 0, 4)) do
        if #wanted < (cls == 'i' and 5 or 8) then wanted[#wanted + 1] = string.match(member, '^[^|]*|%d+|(.*)$') end
      end
    end
  end
end
return {jobs, ended, reason, soonest - now, wanted}
