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
local before = settings()
local now, tank = before.now, refilled(before)
for i = 1, #ARGV, 2 do
  if ARGV[i + 1] == '' then redis.call('HDEL', config, ARGV[i])
  else redis.call('HSET', config, ARGV[i], ARGV[i + 1]) end
end
redis.call('HSETNX', config, 'format', 1)
if tank.tokens and redis.call('HEXISTS', bucket, 'tokens') == 1 then
  redis.call('HSET', bucket, 'tokens', tank.tokens, 'unit', tank.unit, 'at', math.max(tank.at, now))
end
if before.paused_b and not redis.call('HGET', config, 'paused_b') and redis.call('EXISTS', ready_b) == 1 then
  redis.call('HSET', bucket, 'since', now)
  redis.call('PEXPIRE', bucket, WEEK)
end
ring('i', 64)
ring('b', 64)
return 1
