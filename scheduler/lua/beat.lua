-- beat: a worker lives. All fields each time, so that a Redis that came back empty knows it again at once.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 worker   the worker's heartbeat
-- ARGV    1 id        the worker
--         2 ttl       ms after which it counts as gone
--         3.. field, value  one pair a field
-- From    any state
-- To      the same state
-- Returns the format of the queue's data; Redis' time in ms; the live settings

local worker = KEYS[19]
local id, ttl = ARGV[1], ARGV[2]

redis.call('DEL', worker) -- allowed at maxmemory, and then the rest is too
redis.call('HSET', worker, unpack(ARGV, 3))
redis.call('PEXPIRE', worker, ttl)
redis.call('ZADD', workers, clock(), id)
redis.call('PEXPIRE', workers, WEEK)
redis.call('HSETNX', config, 'format', 1)
return {redis.call('HGET', config, 'format'), clock(), redis.call('HGETALL', config)}
