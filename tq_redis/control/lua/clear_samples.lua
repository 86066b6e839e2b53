-- Forget rows: their cells, keys, tags, groups and consumption. Unknown rows are passed over, so
-- that a clear can be repeated.
-- ARGV     request, request_ttl, idle_ttl, ids (ranges)
-- Returns  code ok: freed (handles to free), cleared (rows that were there)
local replayed = replay()
if replayed then
  return replayed
end
if not partition_exists() then
  return cmsgpack.pack({ code = 'ok', freed = {}, cleared = 0 })
end
local asked = expand(args.ids)
local scores, ids = lookup('ZMSCORE', key('samples'), asked), {}
for i = 1, #asked do
  if scores[i] then
    ids[#ids + 1] = asked[i]
  end
end

for _, field in ipairs(redis.call('HKEYS', key('schema'))) do
  local locators = lookup('HMGET', key('field', field), ids)
  release_cells(locators, #ids)
  local removed = call('HDEL', key('field', field), ids)
  redis.call('HINCRBY', P, 'produced:' .. field, -removed)
end
for task, definition in pairs(task_definitions()) do
  drop_ready(task, definition.group_size, ids)
  local removed = call('HDEL', key('task', task), ids)
  if removed > 0 then
    redis.call('HINCRBY', P, 'consumed:' .. task, -removed)
  end
end
for _, name in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
  call('HDEL', key('tag', name), ids)
end
local names = lookup('HMGET', key('key_of'), ids)
for i = 1, #ids do
  if names[i] then
    redis.call('HDEL', key('keys'), names[i])
  end
end
local groups = lookup('HMGET', key('group'), ids)
for i = 1, #ids do
  if groups[i] then
    local kept = {}
    for id in string.gmatch(redis.call('HGET', key('members'), groups[i]), '%d+') do
      if tonumber(id) ~= ids[i] then
        kept[#kept + 1] = id
      end
    end
    if #kept > 0 then
      redis.call('HSET', key('members'), groups[i], table.concat(kept, ','))
    else
      redis.call('HDEL', key('members'), groups[i])
    end
  end
end
call('HDEL', key('key_of'), ids)
call('HDEL', key('group'), ids)
local removed = call('ZREM', key('samples'), ids)
redis.call('HINCRBY', P, 'samples', -removed)
event('clear', 'rows', removed)
touch()
return finish({ code = 'ok', freed = redis.call('SMEMBERS', key('freed')), cleared = removed })
