-- Give a task's consumer samples that have all the fields it reads, and mark them consumed.
-- ARGV     request, request_ttl, idle_ttl, task, fields, count, group_size (0: single samples),
--          index (name of the ready index of this task, group size and fields), consumer,
--          build (rows that one call may add to an index that is not complete yet)
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

-- 1. The index, built once, a bounded piece a call.
local known, name, size = indexes(), args.index, args.group_size
local index = known[name]
  or { task = args.task, fields = args.fields, group_size = size, built = 0, done = false }
if not index.done then
  local ids = redis.call('ZRANGEBYSCORE', key('samples'),
    string.format('(%d', index.built), '+inf', 'LIMIT', 0, args.build)
  add_ready(name, index, claimable(index, ids, {}))
  index.built = tonumber(ids[#ids] or index.built)
  index.done = #ids < args.build
  redis.call('HSET', key('indexes'), name, cjson.encode(index))
  touch()
  if not index.done then
    return cmsgpack.pack({ code = 'building' })
  end
end

-- 2. Enough to claim?
local ready = key('ready', name)
local waiting = redis.call('ZCARD', ready)
local groups = size > 0 and tonumber(redis.call('HGET', key('ready', name, 'count'), ':whole')) or 0
local enough = size == 0 and waiting or groups * size
if enough < args.count then
  return cmsgpack.pack({ code = 'short', ready = waiting, groups = groups, event = last_event() })
end

-- 3. Take them, lowest ids first, or the group with the lowest ready id first.
local ids = {}
if size == 0 then
  local popped = redis.call('ZPOPMIN', ready, args.count)
  for i = 1, #popped, 2 do
    ids[#ids + 1] = popped[i]
  end
else
  -- A group of more samples than a claim takes gives several, one a round.
  while #ids < args.count do
    local wanted = (args.count - #ids) / size
    local taken, changes = {}, {}
    for _, group in ipairs(redis.call('ZRANGE', key('ready', name, 'groups'), 0, wanted - 1)) do
      for _, member in ipairs(first_of(name, group, size)) do
        taken[#taken + 1], ids[#ids + 1] = member, id_of(member)
      end
      changes[group] = -size
    end
    call('ZREM', ready, taken)
    recount(name, size, changes)
  end
end
local records, numbers = {}, {}
for i, id in ipairs(ids) do
  records[2 * i - 1], records[2 * i] = id, args.consumer
  numbers[i] = tonumber(id)
end
call('HSET', key('task', args.task), records)
for other, definition in pairs(known) do
  if other ~= name and definition.task == args.task then
    drop_ready(other, definition, ids)
  end
end
redis.call('HINCRBY', P, 'consumed:' .. args.task, #ids)
event('claim', 'task', args.task, 'rows', #ids)
touch()
return finish({
  code = 'ok',
  ids = numbers,
  tags = tags_of(ids),
  schema = lookup('HMGET', key('schema'), args.fields),
})
