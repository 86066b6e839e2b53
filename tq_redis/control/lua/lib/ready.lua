-- Ready indexes: for each way in which a task asks for samples, those that it may claim.

-- name -> {task, fields, group_size, built, done}. Rows up to the id `built` were looked at when the
-- index was made, later ones are entered when they are written; nothing is claimed until it is done.
local known_indexes
local function indexes()
  if not known_indexes then
    local flat = redis.call('HGETALL', key('indexes'))
    known_indexes = {}
    for i = 1, #flat, 2 do
      known_indexes[flat[i]] = cjson.decode(flat[i + 1])
    end
  end
  return known_indexes
end

-- Another partition took the place of the one whose indexes were read.
local function forget_indexes()
  known_indexes = nil
end

-- The hashes that tell which samples may be claimed: those of fields that not all samples have, and
-- of what the task has taken, if anything. `has` names fields that need no look.
local function telling(index, has)
  local samples, fields = redis.call('ZCARD', key('samples')), {}
  local taken = key('task', index.task)
  for _, field in ipairs(index.fields) do
    local name = key('field', field)
    if not has[field] and redis.call('HLEN', name) < samples then
      fields[#fields + 1] = name
    end
  end
  return fields, redis.call('EXISTS', taken) == 1 and taken
end

-- Of `ids` of samples, those that have all fields of the index and were not taken by its task.
-- `has` names fields that every id is known to have.
local function claimable(index, ids, has)
  local fields, taken = telling(index, has)
  if #fields == 0 and not taken then
    return ids
  end
  local there, gone = {}, taken and lookup('HMGET', taken, ids) or {}
  for f = 1, #fields do
    there[f] = lookup('HMGET', fields[f], ids)
  end
  local able = {}
  for i = 1, #ids do
    local ok = not gone[i]
    for f = 1, #there do
      ok = ok and there[f][i]
    end
    if ok then
      able[#able + 1] = ids[i]
    end
  end
  return able
end

-- The members of a grouped index, '<group>:<id>' with ids of one width: the order of the bytes is
-- that of groups, then ids. Samples without a group are left out; `groups` has the others'.
local function grouped(ids)
  local found, members, groups = lookup('HMGET', key('group'), ids), {}, {}
  for i = 1, #ids do
    if found[i] then
      members[#members + 1] = found[i] .. ':' .. string.rep('0', 16 - #ids[i]) .. ids[i]
      groups[#members] = found[i]
    end
  end
  return members, groups
end

-- The first `count` ready members of a group.
local function first_of(name, group, count)
  return redis.call('ZRANGEBYLEX', key('ready', name), '[' .. group .. ':', '(' .. group .. ';',
    'LIMIT', 0, count)
end

local function id_of(member)
  return string.match(member, ':0*(%d+)$')
end

-- `changes`: group -> how many more of its samples are ready. A group is listed by its first ready
-- sample while it has enough for a claim; ':whole' counts how many claims there are in all groups.
local function recount(name, size, changes)
  local counts, listed, whole = key('ready', name, 'count'), key('ready', name, 'groups'), 0
  for group, change in pairs(changes) do
    local count = redis.call('HINCRBY', counts, group, change)
    local before = count - change
    whole = whole + math.floor(count / size) - math.floor(before / size)
    if count >= size then
      redis.call('ZADD', listed, id_of(first_of(name, group, 1)[1]), group)
    elseif before >= size then
      redis.call('ZREM', listed, group)
    end
    if count == 0 then
      redis.call('HDEL', counts, group)
    end
  end
  if whole ~= 0 then
    redis.call('HINCRBY', counts, ':whole', whole)
  end
end

-- Enter ids into a ready index; those that are in it stay.
local function add_ready(name, index, ids)
  local ready = key('ready', name)
  if index.group_size == 0 then
    call('ZADD', ready, by_id(ids))
    return
  end
  local entries = {}
  local members, groups = grouped(ids)
  local present, changes = lookup('ZMSCORE', ready, members), {}
  for i = 1, #members do
    if not present[i] then
      entries[#entries + 1], entries[#entries + 2] = '0', members[i]
      changes[groups[i]] = (changes[groups[i]] or 0) + 1
    end
  end
  call('ZADD', ready, entries)
  recount(name, index.group_size, changes)
end

-- Take ids out of a ready index; those that are not in it are passed over.
local function drop_ready(name, index, ids)
  local ready = key('ready', name)
  if index.group_size == 0 then
    call('ZREM', ready, ids)
    return
  end
  local members, groups = grouped(ids)
  local present, entries, changes = lookup('ZMSCORE', ready, members), {}, {}
  for i = 1, #members do
    if present[i] then
      entries[#entries + 1] = members[i]
      changes[groups[i]] = (changes[groups[i]] or 0) - 1
    end
  end
  call('ZREM', ready, entries)
  recount(name, index.group_size, changes)
end

