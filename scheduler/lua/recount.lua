-- recount: set right the counts that the caps compare with, from what the lanes hold (the self-check).
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19.. stream  all lanes
-- ARGV    1.. lane    their names, in the order of KEYS
-- From    any state
-- To      the same state
-- Returns by how many jobs the counts were wrong; 0 also where the lanes are no longer those that were given

local streams = {unpack(KEYS, 19)}

allow_at_maxmemory()
if redis.call('HLEN', lanes) ~= #ARGV then return 0 end
local real = {i = 0, b = 0}
for i, lane in ipairs(ARGV) do
  local meta = meta_of(lane)
  if not meta then return 0 end
  local entries = redis.pcall('XLEN', streams[i])
  if type(entries) == 'number' then real[meta.cls] = real[meta.cls] + entries end
end
local wrong = 0
for cls, number in pairs(real) do
  local counted = finite(redis.call('HGET', counts, cls)) or 0
  if counted ~= number then
    wrong = wrong + math.abs(counted - number)
    if number > 0 then redis.call('HSET', counts, cls, number) else redis.call('HDEL', counts, cls) end
  end
end
return wrong
