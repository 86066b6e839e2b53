-- Give a task's consumer samples that have all the fields it reads, and mark them consumed.
-- ARGV     request, request_ttl, idle_ttl, task, fields, count, group_size (0: single samples),
--          consumer, build (rows that one call may add to an index that is not complete yet)
-- Returns  code ok: ids (ascending, or group by group), schema (JSON per field), tags ({name, JSON
--          or '' per row}, ...)
--          code short: ready (samples that could be claimed), groups, event (wait after this one)
--          code building: call again, the index of a new (task, fields) pair is not complete
--          code no_partition: event
local replayed = replay()
if replayed then
  return replayed
end
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition', event = last_event() })
end

local task, fields, group_size = args.task, args.fields, args.group_size
local ready, complete = key('ready', task), key('ready', task, 'groups')

local function same_definition(definition)
  if definition.group_size ~= group_size or #definition.fields ~= #fields then
    return false
  end
  for i = 1, #fields do
    if definition.fields[i] ~= fields[i] then
      return false
    end
  end
  return true
end

-- 1. The index of this (task, fields, group size), built once, a bounded piece a call.
local stored = redis.call('HGET', key('tasks'), task)
local definition = stored and cjson.decode(stored)
if not definition or not same_definition(definition) then
  redis.call('UNLINK', ready, complete, key('ready', task, 'count'))
  definition = { fields = fields, group_size = group_size, built = 0, done = false }
end
if not definition.done then
  local ids = redis.call('ZRANGEBYSCORE', key('samples'),
    string.format('(%.0f', definition.built), '+inf', 'LIMIT', 0, args.build)
  for i = 1, #ids do
    ids[i] = tonumber(ids[i])
  end
  add_ready(task, group_size, claimable(task, fields, ids, {}))
  definition.built = ids[#ids] or definition.built
  definition.done = #ids < args.build
  redis.call('HSET', key('tasks'), task, cjson.encode(definition))
  touch()
  if not definition.done then
    return cmsgpack.pack({ code = 'building' })
  end
end

-- 2. Enough to claim?
local waiting = redis.call('ZCARD', ready)
local groups = redis.call('ZCARD', complete)
local enough = group_size == 0 and waiting >= args.count
  or group_size > 0 and groups * group_size >= args.count
if not enough then
  return cmsgpack.pack({ code = 'short', ready = waiting, groups = groups, event = last_event() })
end

-- 3. Take them.
local ids = {}
if group_size == 0 then
  local popped = redis.call('ZPOPMIN', ready, args.count)
  for i = 1, #popped, 2 do
    ids[#ids + 1] = tonumber(popped[i])
  end
else
  local popped = redis.call('ZPOPMIN', complete, args.count / group_size)
  for i = 1, #popped, 2 do
    for id in string.gmatch(redis.call('HGET', key('members'), popped[i]), '%d+') do
      ids[#ids + 1] = tonumber(id)
    end
    redis.call('HDEL', key('ready', task, 'count'), popped[i])
  end
  call('ZREM', ready, ids)
end
local records = {}
for i, id in ipairs(ids) do
  records[2 * i - 1], records[2 * i] = id, args.consumer
end
call('HSET', key('task', task), records)
redis.call('HINCRBY', P, 'consumed:' .. task, #ids)
event('claim', 'task', task, 'rows', #ids)
touch()
return finish({
  code = 'ok',
  ids = ids,
  tags = tags_of(ids),
  schema = redis.call('HMGET', key('schema'), unpack(fields)),
})
