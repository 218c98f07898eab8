-- lose: account for entries that somebody deleted while they were pending: jobs that nobody can finish any more.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the lane
--         20 back     what waits again there
--         21 batch    the batch's record (batches only)
--         22 results  the batch's results (batches only)
-- ARGV    1 lane      name of the lane
--         2 kind      job or line
--         3.. entry   those that a sweep found deleted
-- From    running
-- To      ended (lost)
-- Returns how many were accounted for
--
-- A line ends with an error line, so that its batch can complete; what its custom_id was went with the entry. The
-- waiter of a single job sees by itself that its entry is gone, and recount sets its count right.

local stream, back, batch, results = KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local lane, kind = ARGV[1], ARGV[2]

allow_at_maxmemory()
local meta, now = meta_of(lane), clock()
if not meta then return 0 end
if kind == 'job' then
  if redis.call('XLEN', stream) == 0 then remove_lane(lane, meta, stream, back) end
  return #ARGV - 2
end
for i = 3, #ARGV do
  local line = string.match(ARGV[i], '^%d+')
  redis.call('XADD', results, '*', 'n', line, 'k', 'line-' .. line, 's', 'failed', 'e', 'lost',
    'm', 'the line was deleted from Redis while it ran')
end
uncount('b', #ARGV - 2)
add(batch, 'failed', #ARGV - 2)
end_batch_when_done(lane, meta, stream, back, batch, results, now)
return #ARGV - 2
