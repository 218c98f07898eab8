-- hand_back: return an unfinished job (shutdown, preemption, overload, engine gone) without spending an attempt.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19.. stream, back  one pair a job: its lane, what waits again there
-- ARGV    1 consumer  who ran the jobs
--         2.. lane, entry, delivery, delay, preempted, kept  one group a job; delay in ms; preempted is 1 for a
--             preemption; kept is what the next attempt may go on from, empty for nothing
-- From    running
-- To      waiting; delayed where there is a delay
-- Returns positions (from 1) of the jobs whose lease belongs to another delivery; nothing was written for those

local consumer = ARGV[1]

allow_at_maxmemory()
local now, refused = clock(), {}

-- What the claim charged to the service of a tenant whose job made way is charged again when the job is next claimed.
-- Who was refused keeps the charge: without it a tenant whose lines an engine always refuses would always be next.
local function refund(meta, stream, entry, at)
  if not meta or meta.cls == 'i' or not is_charged(meta.tenant, at, now) then return end
  local stored = redis.call('XRANGE', stream, entry, entry)[1]
  local cost = stored and cost_of(stored[2]) or 0
  redis.call('ZADD', ready_b, 'XX', 'INCR', -cost / weight_of(meta.tenant), meta.tenant)
end

for at = 2, #ARGV, 6 do
  local position = (at - 2) / 6 + 1
  local stream, back = unpack(KEYS, 17 + 2 * position, 18 + 2 * position)
  local lane, entry, delivery, delay, preempted, kept = unpack(ARGV, at, at + 5)
  if not holds(stream, entry, delivery, consumer) then
    refused[#refused + 1] = position
  else
    local meta = meta_of(lane)
    local _, a, c, p, flags = past(lane, entry)
    remember(lane, entry, delivery, a, c, p + tonumber(preempted), flags, kept)
    local at = settle_start(lane, entry, false)
    if preempted == '1' then refund(meta, stream, entry, at) end
    local due = tonumber(delay) > 0 and now + tonumber(delay) or nil
    wait_again(lane, meta, stream, back, entry, due, now)
    if meta then ring(meta.cls, 1) end
  end
end
return refused
