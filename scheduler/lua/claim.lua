-- claim: take the next jobs for one worker. The one place where the policy lives.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19.. lane, back  one pair a candidate lane, at most 16
-- ARGV    1 consumer  who claims
--         2 room      free slots, and slots whose batch request may be preempted
--         3 free      free slots
--         4 reserve   slots kept free for chat; empty: no batch, not even by the deadline (the engine refuses work)
--         5 suspects  suspects that the worker runs now
--         6 youngest  the youngest batch line that it runs and may preempt, as lane|entry; empty: none
--         7.. name    the candidate lanes, in the order of KEYS
-- From    waiting, delayed (due)
-- To      running
-- Returns jobs {lane, entry, delivery, why, class, tenant, attempts, crashes, preemptions, fields, kept}; entries for the
--         worker to end, in the same form (expired, cancelled, interrupted, dead: at most 64, outside the room); the reason
--         why no more were given; ms to the next moment at which that may change; the candidate lanes to give next
--         time, where those given were not the right ones; 1 where the youngest line may not be preempted any more
--
-- Cost: the same at 10 jobs waiting and at 10 million. Bounds: 8 lanes (and those of suspects that are held back), 16
-- entries of back at a time, room jobs. Where a bound ends the search, nothing of a lower rank is started.

local consumer, room, free, reserve, suspects, youngest =
  ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local given = {}
for i = 7, #ARGV do given[ARGV[i]] = {stream = KEYS[5 + 2 * i], back = KEYS[6 + 2 * i]} end

local set = settings()
local now, soonest = set.now, set.now + 1000
local jobs, ended = {}, {}
local skip, skipped = {}, {i = 0, b = 0} -- lanes of which all that waits is suspects, while this worker runs one
local unsure = nil -- why the search was not finished: 'lanes', the next one is not given; 'more', a bound was reached

local function look_again_at(moment)
  if moment and moment > now and moment < soonest then soonest = moment end
end
look_again_at(set.change)

-- 1. Wake the lanes that sleep no longer.
look_again_at(wake_sleepers(now))

-- What is no lane, or has none, llmq did not write. It would be looked at for ever, and what is behind it never.
local function strike(key, member)
  redis.call('ZREM', key, member)
  unsure = 'more'
end

-- The next lane of a class: of the tenant with the least service, the one that is due first.
local function next_lane(cls)
  local tenants = redis.call('ZRANGE', READY[cls], 0, 7 + skipped[cls])
  for _, tenant in ipairs(tenants) do
    local from, to = '[' .. tenant .. '|', '(' .. tenant .. '}'
    local members = redis.call('ZRANGEBYLEX', ORDER[cls], from, to, 'LIMIT', 0, 1 + skipped[cls])
    if #members == 0 then strike(READY[cls], tenant) end
    for _, member in ipairs(members) do
      local due, lane = string.match(member, '^[^|]*|(%d+)|(.+)$')
      local meta = {state = '+', cls = cls, tenant = tenant, due = due, member = member}
      if not lane or not is_name(member) then strike(ORDER[cls], member)
      elseif not skip[lane] then return lane, meta, #tenants == 1 end
    end
  end
end

-- Take up to `want` jobs of a lane: those that wait again first, then new ones. Returns how many were started.
local function take(lane, meta, want, why)
  local stream, back, started, held_back = given[lane].stream, given[lane].back, 0, false
  local function more() return math.min(want - started, 64 - #ended) end
  local function start(entry, delivery, a, c, p, flags, kept)
    local over = entry[2][7] == 'x' and (tonumber(entry[2][8]) or 0) <= now
    local verdict = flags == 'x' and 'cancelled' or flags == 's' and 'interrupted' or over and 'expired'
      or c >= 3 and 'dead'
    local list = verdict and ended or jobs
    list[#list + 1] = {lane, entry[1], delivery, verdict or why, meta.cls, meta.tenant, a, c, p, entry[2], kept}
    if verdict then return end
    started = started + 1
    if c > 0 then suspects = suspects + 1 end
  end
  local again
  repeat
    again = false
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', back, '-inf', now, 'LIMIT', 0, 16)) do
      if more() == 0 then break end
      local d, a, c, p, flags, kept = past(lane, id)
      if c > 0 and suspects > 0 then held_back = true
      else
        local entry = claim_again(stream, back, consumer, id, d + 1)
        if entry then start(entry, d + 1, a, c, p, flags, kept) end
        again = true
      end
    end
  until not again or more() == 0
  local exhausted, last = false, nil
  while more() > 0 and not exhausted do
    local n = more()
    local entries = claim_new(stream, consumer, n)
    for _, entry in ipairs(entries) do
      start(entry, 1, 0, 0, 0, '-', '')
      last = entry[1]
    end
    exhausted = #entries < n
  end
  if held_back and more() > 0 then
    skip[lane], skipped[meta.cls] = true, skipped[meta.cls] + 1
  elseif exhausted or not has_new(stream, last) then
    look_again_at(leave_when_drained(lane, meta, back, now))
  end
  return started
end

-- A lane whose keys somebody replaced by keys of another type is never looked at again, and holds up no other.
local function take_safely(lane, meta, want, why)
  local before = #jobs
  local fine, started = pcall(take, lane, meta, want, why)
  if fine then return started end
  local fault = type(started) == 'table' and started.err or tostring(started)
  if not string.find(fault, 'WRONGTYPE', 1, true) then error(started) end
  leave(lane, meta)
  return #jobs - before
end

-- Start up to `want` jobs of the class's next lane that has any, one where tenants take turns; what each costs goes
-- to its tenant's service.
local function serve(cls, want, why)
  local drained = 0
  while drained < 8 and #ended < 64 do
    local lane, meta, alone = next_lane(cls)
    if not lane then return 0 end
    local due, before = tonumber(meta.due), #jobs
    if due > 0 and due <= now then -- the batch's window is over: the sweeper ends what has not started
      leave(lane, meta)
      set_state(lane, meta, '!')
      redis.call('ZADD', ending, now, lane)
    elseif not given[lane] then
      unsure = 'lanes'
      return 0
    elseif take_safely(lane, meta, alone and want or 1, why) > 0 then
      local cost = 0
      for i = before + 1, #jobs do cost = cost + (cls == 'i' and 1 or cost_of(jobs[i][10])) end
      redis.call('ZADD', READY[cls], 'XX', 'INCR', cost / weight_of(meta.tenant), meta.tenant)
      return #jobs - before
    end
    if not skip[lane] then drained = drained + 1 end
  end
  unsure = 'more'
  return 0
end

local waits = redis.call('EXISTS', ready_b) == 1
local may_batch = waits and not set.paused_b and set.open and reserve ~= nil
local tank = may_batch and refilled(set)
local spent = false

-- Batch starts cost what the bucket counts: jobs, or LLM tokens. A start by the deadline is debt.
local function pay(from, as_debt)
  spent = true
  for i = from, #jobs do
    local protected = as_debt or jobs[i][9] >= 3
    redis.call('ZADD', starts, protected and now or -now, jobs[i][1] .. '|' .. jobs[i][2])
    if set.rate then
      local left = tank.tokens - (set.unit == 'tok' and cost_of(jobs[i][10]) or 1)
      tank.tokens = as_debt and math.max(math.min(tank.tokens, -set.burst), left) or left
    end
  end
end

-- 2. The deadline: batch always makes progress, whatever chat waits and however empty the bucket is. Only starts that
-- are left to finish count: what may still be preempted does not. Where the worker runs such a line, that line is
-- protected, and counts, before another one is started.
local protects = 0

-- The clock was set back: what happened after now happened now, or the deadline would wait until then.
local function bring_back()
  allow_at_maxmemory()
  for _, start in ipairs(redis.call('ZRANGEBYSCORE', starts, '(' .. now, '+inf', 'LIMIT', 0, 1000)) do
    redis.call('ZADD', starts, now, start)
  end
  for _, field in ipairs({'start', 'since'}) do
    if (finite(redis.call('HGET', bucket, field)) or 0) > now then redis.call('HSET', bucket, field, now) end
  end
  return now
end

if may_batch and room > 0 then
  local newest = tonumber(redis.call('ZREVRANGE', starts, 0, 0, 'WITHSCORES')[2] or 0)
  local last = math.max(tank.last, newest, set.opened)
  if last > now then last = bring_back() end
  if last + set.deadline <= now then
    local begun = math.min(now, -tonumber(youngest ~= '' and redis.call('ZSCORE', starts, youngest) or 0))
    if begun > last then
      redis.call('ZREM', starts, youngest) -- first a write that is allowed at maxmemory
      redis.call('ZADD', starts, begun, youngest)
      last, protects, room = begun, 1, room - 1
    end
    if last + set.deadline <= now and room > 0 and serve('b', 1, 'deadline') == 1 then pay(1, true) end
  end
  look_again_at(last + set.deadline)
end

-- 3. Interactive, up to the room: tenants in turn.
while not set.paused_i and not unsure and #jobs < room do
  if serve('i', room - #jobs, 'chat') == 0 then break end
end

-- 4. Batch, only if nothing interactive is claimable: above the reserve, and as the bucket allows.
local reason = waits and not may_batch and (set.paused_b and 'paused' or not set.open and 'window' or 'busy') or 'empty'
while may_batch and not unsure do
  if set.yields > now then -- chat is too slow all over the fleet
    reason = 'objective'
    look_again_at(set.yields)
    break
  end
  local quota, before = free - #jobs - reserve, #jobs
  if quota <= 0 then reason = 'busy' break end
  if set.rate and tank.tokens < 1 then
    reason = 'bucket'
    look_again_at(now + math.ceil((1 - tank.tokens) * 1000 / set.rate))
    break
  end
  if set.rate then quota = set.unit == 'tok' and 1 or math.min(quota, math.floor(tank.tokens)) end
  if serve('b', quota, 'bucket') == 0 then break end
  pay(before + 1, false)
end
if spent then save_bucket(tank, now)
elseif reason == 'bucket' and not tank.dry then
  redis.pcall('HSET', bucket, 'dry', now) -- only a figure: at maxmemory it may be refused
end

-- 5. The room is filled and more may wait: pass the ring on.
local full = #jobs > 0 and #jobs >= room
if full and not set.paused_i and redis.call('EXISTS', ready_i) == 1 then ring('i', 1) end
if spent and reason == 'busy' and redis.call('EXISTS', ready_b) == 1 then ring('b', 1) end

-- The lanes to give next time: the first 5 of chat and 3 of batch at least, and those that are skipped.
local wanted, fresh = {}, false
if unsure == 'lanes' then
  local most = {i = math.min(13, 5 + skipped.i), b = math.min(16, 8 + skipped.i + skipped.b)}
  skip, skipped = {}, {i = 0, b = 0}
  for _, cls in ipairs({'i', 'b'}) do
    local lane = next_lane(cls)
    while lane and #wanted < most[cls] do
      wanted[#wanted + 1], skip[lane], skipped[cls] = lane, true, skipped[cls] + 1
      fresh = fresh or not given[lane]
      lane = next_lane(cls)
    end
  end
end
if fresh then reason = 'lanes' elseif unsure then reason = unsure == 'more' and 'more' or 'busy' end
return {jobs, ended, reason, unsure == 'more' and 0 or soonest - now, wanted, protects}
