-- leave: a call of an API key has ended; its place is free, and its LLM tokens are set right.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 limit    what the key has left
--         20 passes   the key's calls that run or wait
-- ARGV    1 pass      the call
--         2 requests  a minute; empty: no limit
--         3 tokens    LLM tokens a minute; empty: no limit
--         4 more      LLM tokens that it took on top of what was expected; negative: it took less
-- From    any state
-- To      the same state
-- Returns 1
--
-- What was taken on top is debt, an hour's worth at most: one answer that ran away may not lock a key out for days.

local limit, passes = KEYS[19], KEYS[20]
local pass, requests, tokens, more = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

allow_at_maxmemory()
redis.call('ZREM', passes, pass)
if not tokens or more == 0 then return 1 end
local left_requests, left_tokens, at = unpack(redis.call('HMGET', limit, 'requests', 'tokens', 'at'))
if not left_tokens and more < 0 then return 1 end -- it is full
local now = clock()
at = tonumber(at) or now
local elapsed = math.max(0, now - at)

-- Refilled before it is set right, as in enter: debt may not be paid from what a full bucket had no room for.
local function filled(left, minute)
  return math.min(minute, (tonumber(left) or minute) + elapsed * minute / 60000)
end
local t = math.max(-60 * tokens, math.min(tokens, filled(left_tokens, tokens) - more))
redis.call('HSET', limit, 'tokens', t, 'at', math.max(at, now))
if requests then redis.call('HSET', limit, 'requests', filled(left_requests, requests)) end
redis.call('PEXPIRE', limit, math.ceil((tokens - t) * 60000 / tokens) + 120000) -- the requests need a minute at most
return 1
