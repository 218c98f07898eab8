-- submit_lines: append a chunk of lines to an open batch.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the batch's lane
--         20 batch    the batch's record
--         21 results  the batch's results
-- ARGV    1 lane      name of the batch's lane
--         2 from      number of the chunk's first line: taken only when the batch expects it
--         3 to        number of the line after the chunk
--         4.. number, key, data, cost  one group a line; a bad line has no data, and its fault as the cost
-- From    nothing
-- To      waiting (bad lines: ended)
-- Returns ok, next line | skip, next line (another producer was here) | full, room | closed, status
--
-- Submitting a file is idempotent without a key per line: an entry's id is its line number, and a chunk is taken only
-- where it continues the batch. Lines between `from` and `to` that are not given are blank.

local stream, batch, results = KEYS[19], KEYS[20], KEYS[21]
local lane, from, to = ARGV[1], ARGV[2], ARGV[3]

local expected, sealed, status = unpack(redis.call('HMGET', batch, 'next', 'sealed', 'status'))
if not finite(expected) then return {'closed', 'lost'} end
if sealed == '1' then return {'closed', status} end
if expected ~= from then return {'skip', tonumber(expected)} end
local good, bad = 0, 0
for i = 4, #ARGV, 4 do if ARGV[i + 2] ~= '' then good = good + 1 else bad = bad + 1 end end
local cap = setting('cap_batch', 1000000)
local room = cap - (finite(redis.call('HGET', counts, 'b')) or 0)
if good > room then return {'full', math.max(0, room)} end

local now = clock()
for i = 4, #ARGV, 4 do
  local number, key, data, cost = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if data ~= '' then
    redis.call('XADD', stream, number .. '-0', 'k', key, 'd', data, 'c', cost, 't', now)
  else
    redis.call('XADD', results, '*', 'n', number, 'k', key, 's', 'failed', 'e', 'invalid_line', 'm', cost)
  end
end
redis.call('HSET', batch, 'next', to)
add(batch, 'lines', good + bad)
if bad > 0 then add(batch, 'failed', bad) end
if good > 0 then
  redis.pcall('XGROUP', 'CREATE', stream, 'workers', 0) -- the first chunk makes it; later ones find it there
  add(counts, 'b', good)
  arrive(lane, meta_of(lane), now)
  ring('b', math.ceil(good / 8))
end
return {'ok', tonumber(to)}
