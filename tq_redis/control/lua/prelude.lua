-- Shared by every verb; put in front of it when the script is loaded.
-- KEYS[1]  the partition's summary hash, tq:<ns>:{P}. All other keys are this one plus a suffix
--          (keys.py lists them), so they share its hash tag and its cluster slot.
-- ARGV[1]  the verb's arguments, one msgpack map. Names in it are percent-encoded already.
-- Returns  one msgpack map; `code` says what happened.
local P = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])

-- Values given to one redis.call: Lua's C stack holds about 8,000.
local CHUNK = 2000

local function key(...)
  return P .. ':' .. table.concat({ ... }, ':')
end

-- {start, count, start, count, ...} -> {id, id, ...}
local function expand(ranges)
  local ids = {}
  for i = 1, #ranges, 2 do
    for id = ranges[i], ranges[i] + ranges[i + 1] - 1 do
      ids[#ids + 1] = id
    end
  end
  return ids
end

-- call(command, key, value, value, ...) in chunks; the integer replies are added up.
local function call(command, name, values)
  local total = 0
  for first = 1, #values, CHUNK do
    local last = math.min(first + CHUNK - 1, #values)
    total = total + redis.call(command, name, unpack(values, first, last))
  end
  return total
end

-- One reply per value, in order; false where there is none.
local function lookup(command, name, values)
  local found = {}
  for first = 1, #values, CHUNK do
    local last = math.min(first + CHUNK - 1, #values)
    local part = redis.call(command, name, unpack(values, first, last))
    for i = 1, #part do
      found[first + i - 1] = part[i]
    end
  end
  return found
end

local function partition_exists()
  return redis.call('EXISTS', P) == 1
end

-- The ids that the partition does not have.
local function unknown(ids)
  local scores, missing = lookup('ZMSCORE', key('samples'), ids), {}
  for i = 1, #ids do
    if not scores[i] then
      missing[#missing + 1] = ids[i]
    end
  end
  return missing
end

local function task_definitions()
  local tasks, flat = {}, redis.call('HGETALL', key('tasks'))
  for i = 1, #flat, 2 do
    tasks[flat[i]] = cjson.decode(flat[i + 1])
  end
  return tasks
end

-- Of `ids`, those that have all fields of the task and were not taken by it.
-- `has` names fields that every id is known to have.
local function claimable(task, fields, ids, has)
  local checks = { lookup('HMGET', key('task', task), ids) }
  for _, field in ipairs(fields) do
    if not has[field] then
      checks[#checks + 1] = lookup('HMGET', key('field', field), ids)
    end
  end
  local able = {}
  for i = 1, #ids do
    local ok = not checks[1][i]
    for c = 2, #checks do
      ok = ok and checks[c][i]
    end
    if ok then
      able[#able + 1] = ids[i]
    end
  end
  return able
end

local function first_member(group)
  return string.match(redis.call('HGET', key('members'), group), '^%d+')
end

-- Enter ids into a task's ready index; a group enters as a whole with its last sample.
local function add_ready(task, group_size, ids)
  local ready = key('ready', task)
  if group_size == 0 then
    local pairs_ = {}
    for i, id in ipairs(ids) do
      pairs_[2 * i - 1], pairs_[2 * i] = id, id
    end
    call('ZADD', ready, pairs_)
    return
  end
  local groups = lookup('HMGET', key('group'), ids)
  for i, id in ipairs(ids) do
    if redis.call('ZADD', ready, id, id) == 1 and groups[i] then
      local count = redis.call('HINCRBY', key('ready', task, 'count'), groups[i], 1)
      if count == group_size then
        redis.call('ZADD', key('ready', task, 'groups'), first_member(groups[i]), groups[i])
      end
    end
  end
end

-- Take ids out of a task's ready index.
local function drop_ready(task, group_size, ids)
  local ready = key('ready', task)
  if group_size == 0 then
    call('ZREM', ready, ids)
    return
  end
  local groups = lookup('HMGET', key('group'), ids)
  for i, id in ipairs(ids) do
    if redis.call('ZREM', ready, id) == 1 and groups[i] then
      local count = redis.call('HINCRBY', key('ready', task, 'count'), groups[i], -1)
      if count == group_size - 1 then
        redis.call('ZREM', key('ready', task, 'groups'), groups[i])
      end
      if count == 0 then
        redis.call('HDEL', key('ready', task, 'count'), groups[i])
      end
    end
  end
end

-- Cells with these locators are no longer used. Blocks without a used cell go to `freed`, where
-- they stay until a client has freed the bytes, so that a crash in between loses no memory.
local function release_cells(locators, count)
  local gone = {}
  for i = 1, count do
    if locators[i] then
      local number = string.match(locators[i], '^%d+')
      gone[number] = (gone[number] or 0) + 1
    end
  end
  for number, cells in pairs(gone) do
    if redis.call('HINCRBY', key('live'), number, -cells) == 0 then
      local block = cjson.decode(redis.call('HGET', key('blocks'), number))
      redis.call('SADD', key('freed'), block.handle)
      redis.call('HINCRBY', P, 'bytes', -block.bytes)
      redis.call('HDEL', key('live'), number)
      redis.call('HDEL', key('blocks'), number)
    end
  end
end

-- Every key of the partition but the trash and the replies.
local function partition_keys()
  local names = { P }
  for _, suffix in ipairs({ 'samples', 'schema', 'blocks', 'live', 'freed', 'tasks', 'group',
      'members', 'keys', 'key_of', 'tagnames', 'events' }) do
    names[#names + 1] = key(suffix)
  end
  for _, field in ipairs(redis.call('HKEYS', key('schema'))) do
    names[#names + 1] = key('field', field)
  end
  for _, task in ipairs(redis.call('HKEYS', key('tasks'))) do
    names[#names + 1] = key('task', task)
    names[#names + 1] = key('ready', task)
    names[#names + 1] = key('ready', task, 'count')
    names[#names + 1] = key('ready', task, 'groups')
  end
  for _, tag in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
    names[#names + 1] = key('tag', tag)
  end
  return names
end

-- Restart the partition's lifetime: all keys in one script, so that they expire in one instant.
local function touch()
  for _, name in ipairs(partition_keys()) do
    redis.call('EXPIRE', name, args.idle_ttl)
  end
end

-- {{name, JSON per row}, ...}; '' where a row has no such tag.
local function tags_of(ids)
  local tags = {}
  for _, name in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
    local values = lookup('HMGET', key('tag', name), ids)
    for i = 1, #ids do
      values[i] = values[i] or ''
    end
    tags[#tags + 1] = { name, values }
  end
  return tags
end

-- `kind` is put, claim or clear. Waiters block on this stream.
local function event(kind, ...)
  redis.call('XADD', key('events'), 'MAXLEN', '~', 256, '*', 'kind', kind, ...)
end

local function last_event()
  local entries = redis.call('XREVRANGE', key('events'), '+', '-', 'COUNT', 1)
  return entries[1] and entries[1][1] or '0-0'
end

-- The stored reply if this request ran before, else false.
local function replay()
  return redis.call('GET', key('req', args.request))
end

-- Store the reply for a replay and return it.
local function finish(reply)
  local packed = cmsgpack.pack(reply)
  redis.call('SET', key('req', args.request), packed, 'EX', args.request_ttl)
  return packed
end
