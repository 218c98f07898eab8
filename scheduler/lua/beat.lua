-- beat: a worker lives. All fields each time, so that a Redis that came back empty knows it again at once.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 worker   the worker's heartbeat
--         20 totals   what all workers have counted
-- ARGV    1 id        the worker
--         2 ttl       ms after which it counts as gone
--         3.. field, value, told  one group a field; told is empty, or the field is a total (t.*) and told is what the
--                     worker knows to be counted of it
-- From    any state
-- To      the same state
-- Returns the format of the queue's data; Redis' time in ms; the live settings
--
-- What is new of a total is what it has grown by since the last heartbeat. That one may have been written without the
-- worker's knowledge (its reply was lost), so the heartbeat is asked first; where it is gone, the worker knows best.

local worker, totals = KEYS[19], KEYS[20]
local id, ttl = ARGV[1], ARGV[2]

local names, grown = {}, {}
for i = 3, #ARGV, 3 do
  if ARGV[i + 2] ~= '' then names[#names + 1] = i end
end
for first = 1, #names, 100 do
  local ask = {'HMGET', worker}
  for n = first, math.min(first + 99, #names) do ask[#ask + 1] = ARGV[names[n]] end
  local counted = redis.call(unpack(ask))
  for n = 1, #ask - 2 do
    local i = names[first + n - 1]
    local more = tonumber(ARGV[i + 1]) - math.max(tonumber(counted[n] or 0) or 0, tonumber(ARGV[i + 2]))
    if more > 0 then grown[string.sub(ARGV[i], 3)] = more end
  end
end

redis.call('DEL', worker) -- allowed at maxmemory, and then the rest is too
for first = 3, #ARGV, 300 do
  local write = {'HSET', worker}
  for i = first, math.min(first + 297, #ARGV), 3 do
    write[#write + 1] = ARGV[i]
    write[#write + 1] = ARGV[i + 1]
  end
  redis.call(unpack(write))
end
redis.call('PEXPIRE', worker, ttl)
for name, more in pairs(grown) do add(totals, name, string.format('%.0f', more)) end
redis.call('PEXPIRE', totals, WEEK)
redis.call('ZADD', workers, clock(), id)
redis.call('PEXPIRE', workers, WEEK)
redis.call('HSETNX', config, 'format', 1)
return {redis.call('HGET', config, 'format'), clock(), redis.call('HGETALL', config)}
