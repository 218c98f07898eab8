-- enter: let one call of an API key in, within all limits of the key, or refuse it and take nothing.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 limit    what the key has left
--         20 passes   the key's calls that run or wait
-- ARGV    1 pass      the call
--         2 requests  a minute; empty: no limit
--         3 tokens    LLM tokens a minute; empty: no limit
--         4 most      calls at one time; empty: no limit
--         5 cost      LLM tokens that the call is expected to take
--         6 lease     ms after which a call that nobody renews is over: its gateway has died
-- From    any state
-- To      the same state
-- Returns what refused it (requests, tokens, concurrency; empty: it is in); ms after which to try again (0: unknown, -1:
--         never, it costs more than a minute gives); requests left, ms until all are back; LLM tokens left, ms until
--         all are back; calls that run or wait now
--
-- Time is Redis', elapsed is never negative, the last refill never goes back, and what was not written is full.

local limit, passes = KEYS[19], KEYS[20]
local pass, requests, tokens, most, cost, lease =
  ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

allow_at_maxmemory()
local now = clock()
local left_requests, left_tokens, at = unpack(redis.call('HMGET', limit, 'requests', 'tokens', 'at'))
at = tonumber(at) or now
local elapsed = math.max(0, now - at)

local function filled(left, minute)
  return minute and math.min(minute, (tonumber(left) or minute) + elapsed * minute / 60000)
end
local function until_has(left, minute, wanted)
  return math.max(0, math.ceil((wanted - left) * 60000 / minute))
end
local r, t = filled(left_requests, requests), filled(left_tokens, tokens)

-- Calls whose gateway has died are over. A lease that ends later than any can was given before the clock was set back.
redis.call('ZREMRANGEBYSCORE', passes, '-inf', now)
for _, early in ipairs(redis.call('ZRANGEBYSCORE', passes, '(' .. now + lease, '+inf', 'LIMIT', 0, 100)) do
  redis.call('ZADD', passes, now + lease, early)
end
local running = redis.call('ZCARD', passes)

local refused, again = '', 0
if t and t < cost then
  refused = 'tokens'
  again = cost > tokens and -1 or until_has(t, tokens, cost)
end
if r and r < 1 and again >= 0 then
  local ms = until_has(r, requests, 1)
  if refused == '' or ms > again then refused, again = 'requests', ms end
end
if refused == '' and most and running >= most then refused = 'concurrency' end

if refused == '' then
  if r then r = r - 1 end
  if t then t = t - cost end
  if most then
    redis.call('ZADD', passes, now + lease, pass)
    running = running + 1
  end
end
if r then redis.call('HSET', limit, 'requests', r) end
if t then redis.call('HSET', limit, 'tokens', t) end
local r_full, t_full = r and until_has(r, requests, requests) or 0, t and until_has(t, tokens, tokens) or 0
if r or t then
  redis.call('HSET', limit, 'at', math.max(at, now))
  redis.call('PEXPIRE', limit, math.max(r_full, t_full) + 60000) -- by then it is full, which is what absence means
end
if running > 0 then redis.call('PEXPIRE', passes, 2 * lease) end
return {refused, again, math.floor(math.max(0, r or 0)), r_full, math.floor(math.max(0, t or 0)), t_full, running}
