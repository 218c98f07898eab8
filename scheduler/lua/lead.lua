-- lead: become the sweeper for one interval, unless somebody is it already.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 sweeper  the lock; it always has a TTL, so a sweeper that dies is followed by another
-- ARGV    1 consumer  who wants to sweep
--         2 interval  ms
-- From    any state
-- To      the same state
-- Returns 1 where the caller sweeps now; the lanes that are being ended; all lanes with what is known of them; the time

local sweeper = KEYS[19]
local consumer, interval = ARGV[1], ARGV[2]

allow_at_maxmemory()
if not redis.call('SET', sweeper, consumer, 'NX', 'PX', interval) then return {0, {}, {}, 0} end
local now = clock()
-- Results may take a quarter of maxmemory, as far as this server tells it (pcall: an ACL may not permit INFO).
local memory = redis.pcall('INFO', 'memory')
local most = type(memory) == 'string' and tonumber(string.match(memory, 'maxmemory:(%d+)')) or 0
if most == 0 then redis.call('HDEL', config, 'results_quarter')
else redis.call('HSET', config, 'results_quarter', math.floor(most / 4)) end
wake_uncollected(finite(redis.call('GET', held)) or 0, now) -- results end by their TTL too
local known, ends = {}, {}
local all = redis.call('HGETALL', lanes)
for i = 1, #all, 2 do
  if is_name(all[i]) and meta_of(all[i]) then
    known[#known + 1], known[#known + 2] = all[i], all[i + 1]
  else redis.call('HDEL', lanes, all[i]) end -- llmq did not write it
end
for _, lane in ipairs(redis.call('ZRANGE', ending, 0, 63)) do
  if is_name(lane) then ends[#ends + 1] = lane else redis.call('ZREM', ending, lane) end
end
return {1, ends, known, now}
