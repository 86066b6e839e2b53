-- Forget rows: their cells, keys, tags, groups and consumption. Unknown rows are passed over, so
-- that a clear can be repeated.
-- ARGV     request, request_ttl, idle_ttl, ids (ranges, distinct), cells (how many one call may
--          drop: where rows have many, it clears the first few rows only)
-- Returns  code ok: freed (handles to free), cleared (rows that were there), done (how many of the
--          rows named were dealt with)
local replayed = replay()
if replayed then
  return replayed
end
local asked = expand(args.ids)
if not partition_exists() then
  return cmsgpack.pack({ code = 'ok', freed = {}, cleared = 0, done = #asked })
end
local fields, known = redis.call('HKEYS', key('schema')), indexes()
local tags = redis.call('SMEMBERS', key('tagnames'))
local columns = 3 + #fields + #tags
for _ in pairs(known) do
  columns = columns + 4
end
head(asked, math.max(1, math.floor(args.cells / columns)))
local ids = known_and_unknown(asked)

-- Redis lets this pass when its memory is full, and then all that follows.
local removed = call('ZREM', key('samples'), ids)
redis.call('HINCRBY', P, 'samples', 0 - removed) -- not -0, no number to Redis 6.2
for _, field in ipairs(fields) do
  local locators = lookup('HMGET', key('field', field), ids)
  redis.call('HINCRBY', P, 'produced:' .. field, 0 - call('HDEL', key('field', field), ids))
  release_cells(locators, #ids)
end
local tasks = {}
for name, index in pairs(known) do
  drop_ready(name, index, ids)
  tasks[index.task] = true
end
for task in pairs(tasks) do
  drop_records(task, ids)
  call('HDEL', key('deliveries', task), ids)
end
for _, name in ipairs(tags) do
  call('HDEL', key('tag', name), ids)
end
local names = keys_of(ids)
note_changes(names)
call('HDEL', key('keys'), names)
call('HDEL', key('key_of'), ids)
call('HDEL', key('group'), ids)
event('clear', 'rows', removed)
touch()
return finish({ code = 'ok', freed = to_free(), cleared = removed, done = #asked })
