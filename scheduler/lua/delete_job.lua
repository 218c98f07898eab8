-- delete_job: remove the record of a single job that has ended, with its answer.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 job      the job's record
-- ARGV    1 id        the job's id
-- From    ended
-- To      nothing
-- Returns unknown | open (cancel it first) | ok, id
--
-- Only an end may be deleted: the record of a job that lives is what its waiters, and its cancellation, go by.

local job = KEYS[19]
local id = ARGV[1]

local entry, state = unpack(redis.call('HMGET', job, 'entry', 'state'))
if not entry then return {'unknown'} end
if not state then return {'open'} end
redis.call('DEL', job)
return {'ok', id}
