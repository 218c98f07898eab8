-- cancel_job: end a single job that waits, or mark one that runs so that its worker aborts it.
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19 stream   the job's lane
--         20 back     what waits again there
--         21 job      the job's record
--         22 inbox    of the client that waits
-- ARGV    1 id        the job's id
--         2 lane      name of the lane
--         3 state     what it ends as: cancelled; expired where its time in the queue is over; lost where its entry is
--                     gone
--         4 code      for the record
--         5 message   for the record
-- From    waiting, delayed, running
-- To      ended; running, marked (cancelled only)
-- Returns unknown | ended, state | cancelled | signalled, consumer | running (not to be ended: it has started, or lives)

local stream, back, job, inbox = KEYS[19], KEYS[20], KEYS[21], KEYS[22]
local id, lane, state, code, message = unpack(ARGV)

allow_at_maxmemory()
local entry, ended, expires = unpack(redis.call('HMGET', job, 'entry', 'state', 'expires_at'))
if not entry then return {'unknown'} end
if ended then return {'ended', ended} end
local now, meta = clock(), meta_of(lane)
local pending = redis.pcall('XPENDING', stream, 'workers', entry, entry, 1)
if not pending.err and pending[1] then
  if state ~= 'cancelled' then return {'running'} end
  local d, a, c, p = past(lane, entry)
  remember(lane, entry, d, a, c, p, 'x')
  return {'signalled', pending[1][2]}
end
if state == 'expired' and (finite(expires) or math.huge) > now then return {'running'} end
-- Who found its entry gone may have looked at an earlier job of the same key.
if state == 'lost' and #redis.call('XRANGE', stream, entry, entry) > 0 then return {'running'} end
local there = redis.call('XDEL', stream, entry)
redis.call('ZREM', back, entry)
local _, attempts, crashes, preemptions = past(lane, entry)
redis.call('HDEL', tries, lane .. '|' .. entry)
uncount(meta and meta.cls or string.sub(lane, 1, 1), 1)
if there == 0 then state, code = 'lost', 'lost' end -- somebody else deleted it
redis.call('HSET', job, 'state', state, 'code', code, 'message', message, 'ended_at', now,
  'attempts', attempts, 'crashes', crashes, 'preemptions', preemptions)
redis.call('PEXPIRE', job, keep_ms(redis.call('HGET', config, 'keep_interactive'), 600000))
redis.call('XADD', inbox, 'MAXLEN', '~', 10000, '*', 't', 'e', 'j', id, 'v', 0)
redis.call('PEXPIRE', inbox, 600000)
if redis.call('XLEN', stream) == 0 then remove_lane(lane, meta, stream, back)
elseif meta and not has_new(stream) then leave_when_drained(lane, meta, back, now) end
return {'cancelled'}
