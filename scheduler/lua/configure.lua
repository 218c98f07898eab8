-- configure: change live settings; the very next claim of every worker goes by them.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
-- ARGV    1.. field, value  one pair a setting; an empty value is the default again
-- From    any state
-- To      the same state
-- Returns 1
--
-- The bucket is settled at the rate that was in force until now, so that a new rate counts from now on only.

allow_at_maxmemory()
local now = clock()
local rate, burst, paused = unpack(redis.call('HMGET', config, 'rate', 'burst', 'paused_b'))
local tokens, at = unpack(redis.call('HMGET', bucket, 'tokens', 'at'))
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then redis.call('HDEL', config, ARGV[i])
  else redis.call('HSET', config, ARGV[i], ARGV[i + 1]) end
end
redis.call('HSETNX', config, 'format', 1)
if rate and tokens then
  local refilled = math.max(0, now - tonumber(at)) * tonumber(rate) / 1000
  tokens = math.min(tonumber(burst), tonumber(tokens) + refilled)
  redis.call('HSET', bucket, 'tokens', tokens, 'at', math.max(now, tonumber(at)))
  redis.call('PEXPIRE', bucket, WEEK)
end
if paused and not redis.call('HGET', config, 'paused_b') and redis.call('EXISTS', ready_b) == 1 then
  redis.call('HSET', bucket, 'since', now)
  redis.call('PEXPIRE', bucket, WEEK)
end
ring('i', 64)
ring('b', 64)
return 1
