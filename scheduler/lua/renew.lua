-- renew: keep the leases of jobs that this worker still runs.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19.. stream  the lanes that the jobs were claimed from
-- ARGV    1 consumer  who renews
--         2.. lane, number, entry, delivery  one group a job: name of its lane, which of the streams it is (from 1)
-- From    running
-- To      running
-- Returns positions (from 1) of the jobs whose lease belongs to another delivery, for which nothing was written; and
--         of those that somebody cancelled
--
-- JUSTID keeps the delivery count: that count is the fence.

local consumer = ARGV[1]
local streams = {unpack(KEYS, 19)}

local lost, cancelled, kept = {}, {}, {}
for i = 2, #ARGV, 4 do
  local lane, number, entry, delivery = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3]
  local position = (i + 2) / 4
  if not holds(streams[number], entry, delivery, consumer) then
    lost[#lost + 1] = position
  else
    kept[number] = kept[number] or {}
    table.insert(kept[number], entry)
    local _, _, _, _, flags = past(lane, entry)
    local meta = meta_of(lane)
    if flags == 'x' or meta and meta.state == 'x' then cancelled[#cancelled + 1] = position end
  end
end
for number, entries in pairs(kept) do
  for first = 1, #entries, 500 do
    local command = {'XCLAIM', streams[number], 'workers', consumer, 0}
    for i = first, math.min(first + 499, #entries) do command[#command + 1] = entries[i] end
    command[#command + 1] = 'JUSTID'
    redis.call(unpack(command))
  end
end
return {lost, cancelled}
