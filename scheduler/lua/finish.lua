-- finish: end jobs, whatever their outcome (completed, failed, expired, cancelled, interrupted, dead).
--
-- KEYS    1..18 queue   the keys of the queue (queue.lua)
--         19.. stream, back, record, results  one group a job: its lane, what waits again there, its record
--                     (job or batch), where its end is told (the client's inbox, or the batch's results)
-- ARGV    1 consumer  who ran the jobs
--         2 host      for the dead letters
--         3.. lane, entry, delivery, kind, key, state, status, request, body, code, message, prompt, completion,
--             cost, dead, error  one group a job; kind is job or line; dead is 1 for a dead letter
-- From    running
-- To      ended
-- Returns positions (from 1) of the jobs whose lease belongs to another delivery; nothing was written for those
--
-- XACK first: it is allowed at maxmemory, and then the rest is too. An entry is deleted here and by cancel, and by
-- nothing else.

local consumer, host = ARGV[1], ARGV[2]
local GROUP = 16

local virtual, keep_interactive, keep_batch = unpack(redis.call('HMGET', config, 'virtual', 'keep_interactive', 'keep_batch'))
local now = clock(virtual)
local refused, sums, bytes = {}, {}, 0
local ended, served = {}, {} -- jobs by class, and what tenants used beyond what was charged: written once

local function tell_line(at, results, sum, data, failed)
  local key, state, status, request, body, code, message, prompt, completion = unpack(ARGV, at + 4, at + 12)
  local entry = {'XADD', results, '*', 'n', string.match(ARGV[at + 1], '^%d+'), 'k', key, 's', state, 'h', status,
    'q', request, 'b', body, 'e', code, 'm', message, 'u', prompt .. ':' .. completion}
  if failed and data then entry[#entry + 1] = 'd' entry[#entry + 1] = data end
  redis.call(unpack(entry))
  sum[failed and 'failed' or 'completed'] = sum[failed and 'failed' or 'completed'] + 1
  sum.prompt, sum.completion = sum.prompt + tonumber(prompt), sum.completion + tonumber(completion)
  local size = #body + (failed and data and #data or 0)
  sum.bytes = sum.bytes + size
  bytes = bytes + size
end

local function tell_job(at, job, inbox, attempts, crashes, preemptions)
  local key, state, status, request, body, code, message, prompt, completion = unpack(ARGV, at + 4, at + 12)
  redis.call('HSET', job, 'state', state, 'status', status, 'request', request, 'body', body, 'code', code,
    'message', message, 'usage', prompt .. ':' .. completion, 'ended_at', now,
    'attempts', attempts, 'crashes', crashes, 'preemptions', preemptions)
  redis.call('PEXPIRE', job, keep_ms(keep_interactive, 600000))
  redis.pcall('XADD', inbox, 'MAXLEN', '~', 10000, '*', 't', 'e', 'j', key, 'v', ARGV[at + 2])
  redis.call('PEXPIRE', inbox, 600000)
end

for at = 3, #ARGV, GROUP do
  local position = (at - 3) / GROUP + 1
  local stream, back, record, results = unpack(KEYS, 15 + 4 * position, 18 + 4 * position)
  local lane, entry, delivery, kind, key, state = unpack(ARGV, at, at + 5)
  local status, body, code, message = ARGV[at + 6], ARGV[at + 8], ARGV[at + 9], ARGV[at + 10]
  local prompt, completion, cost, dead_letter, last_error =
    tonumber(ARGV[at + 11]), tonumber(ARGV[at + 12]), tonumber(ARGV[at + 13]), ARGV[at + 14], ARGV[at + 15]
  -- An entry's id may come a second time, in a lane that was removed and made again: a job that has ended is not it.
  local known = kind == 'job' and redis.pcall('HEXISTS', record, 'state')
  if type(known) == 'table' then redis.call('DEL', record) end -- somebody put another type of key there
  local repeated = known == 1
  if repeated or not holds(stream, entry, delivery, consumer) then
    refused[#refused + 1] = position
  else
    local meta = sums[lane] and sums[lane].meta or meta_of(lane)
    local cls = meta and meta.cls or string.sub(lane, 1, 1)
    local failed = state ~= 'completed'
    local data
    if failed then
      local stored = redis.call('XRANGE', stream, entry, entry)[1]
      data = stored and stored[2][4]
    end
    redis.call('XACK', stream, 'workers', entry)
    redis.call('XDEL', stream, entry)
    local _, attempts, crashes, preemptions = past(lane, entry)
    if dead_letter == '1' then
      redis.call('XADD', dead, '*', 'key', key, 'lane', lane, 'entry', entry, 'class', cls,
        'tenant', meta and meta.tenant or '', 'data', data or '', 'code', code, 'status', status,
        'error', last_error, 'attempts', attempts, 'crashes', crashes, 'host', host)
    end
    redis.call('HDEL', tries, lane .. '|' .. entry)
    if cls == 'b' then
      local at = settle_start(lane, entry, state ~= 'cancelled')
      local used = prompt + completion
      if used > 0 and meta and is_charged(meta.tenant, at, now) then served[meta.tenant] = (served[meta.tenant] or 0) + used - cost end
    end
    ended[cls] = (ended[cls] or 0) + 1
    if kind == 'line' then
      local sum = sums[lane]
      if not sum then
        sum = {meta = meta, keys = {stream, back, record, results},
          completed = 0, failed = 0, prompt = 0, completion = 0, bytes = 0}
        sums[lane] = sum
      end
      tell_line(at, results, sum, data, failed)
    else
      tell_job(at, record, results, attempts, crashes, preemptions)
      if redis.call('XLEN', stream) == 0 then remove_lane(lane, meta, stream, back) end
    end
  end
end

for cls, count in pairs(ended) do uncount(cls, count) end
for tenant, tokens in pairs(served) do
  redis.call('ZADD', ready_b, 'XX', 'INCR', tokens / weight_of(tenant), tenant)
end
if bytes > 0 then
  bytes = hold_bytes(bytes)
  redis.call('PEXPIRE', held, keep_ms(keep_batch, WEEK))
end
local limit = results_limit()
for lane, sum in pairs(sums) do
  local stream, back, batch, results = unpack(sum.keys)
  if sum.completed > 0 then add(batch, 'completed', sum.completed) end
  if sum.failed > 0 then add(batch, 'failed', sum.failed) end
  if sum.prompt > 0 then add(batch, 'prompt_tokens', sum.prompt) end
  if sum.completion > 0 then add(batch, 'completion_tokens', sum.completion) end
  if sum.bytes > 0 then add(batch, 'bytes', sum.bytes) end
  local over = end_batch_when_done(lane, sum.meta, stream, back, batch, results, now)
  if not over and bytes > limit and sum.meta and sum.meta.state == '+' and not holds_little(batch, limit) then
    leave(lane, sum.meta)
    redis.call('ZADD', asleep, UNCOLLECTED, lane)
  end
end
return refused
