-- Forgetting rows.

-- How many rows one call may forget, so that it drops about `cells` cells.
local function rows_to_forget(cells)
  local columns = 3 + #redis.call('HKEYS', key('schema')) + #redis.call('SMEMBERS', key('tagnames'))
  for _ in pairs(indexes()) do
    columns = columns + 4
  end
  return math.max(1, math.floor(cells / columns))
end

-- Forget rows that the partition has: their cells, keys, tags, groups and consumption. Returns how
-- many they were.
local function forget_rows(ids)
  -- Redis lets this pass when its memory is full, and then all that follows.
  local removed = call('ZREM', key('samples'), ids)
  redis.call('HINCRBY', P, 'samples', 0 - removed) -- not -0, no number to Redis 6.2
  for _, field in ipairs(redis.call('HKEYS', key('schema'))) do
    local locators = lookup('HMGET', key('field', field), ids)
    redis.call('HINCRBY', P, 'produced:' .. field, 0 - call('HDEL', key('field', field), ids))
    release_cells(locators, #ids)
  end
  local tasks = {}
  for name, index in pairs(indexes()) do
    drop_ready(name, index, ids)
    tasks[index.task] = true
  end
  for task in pairs(tasks) do
    drop_records(task, ids)
    call('HDEL', key('deliveries', task), ids)
  end
  for _, name in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
    call('HDEL', key('tag', name), ids)
  end
  local names = keys_of(ids)
  note_changes(names)
  call('HDEL', key('keys'), names)
  call('HDEL', key('key_of'), ids)
  call('HDEL', key('group'), ids)
  return removed
end
