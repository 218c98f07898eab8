-- keep_key: make an API key, or change one that nobody else has changed meanwhile.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 keys     the API keys of the queue
-- ARGV    1 id        the key
--         2 record    what is kept of it from now on
--         3 before    what the caller read of it; empty: it is new
--         4 most      keys that a queue may have
-- From    any state
-- To      the same state
-- Returns ok | changed (somebody else did) | full (the most)
--
-- The field `stamp` changes with every write, so that a gateway sees with one small read that nothing has changed; it
-- also says for ever that this queue has had a key.

local keys = KEYS[19]
local id, record, before, most = unpack(ARGV)

allow_at_maxmemory() -- a key can be revoked on a server that is full
if (redis.call('HGET', keys, id) or '') ~= before then return {'changed'} end
if before == '' and redis.call('HLEN', keys) > tonumber(most) then return {'full', most} end
redis.call('HSET', keys, id, record)
redis.call('HINCRBY', keys, 'stamp', 1)
return {'ok'}
