-- Cells, the blocks that they lie in, and tags.

-- Freed blocks that one reply names beyond its own: what a client that died left behind.
local STALE_BLOCKS, STALE_S = 64, 60

-- The number of the block that a locator names.
local numbers = {}
local function block_of(locator)
  local number = numbers[locator]
  if not number then
    number = string.match(locator, '^%d+')
    numbers[locator] = number
  end
  return number
end

-- Cells with these locators are no longer used. Blocks without a used cell go to `freed`, where
-- they stay until a client has freed the bytes, so that a crash in between loses no memory.
local freed = {}
local function release_cells(locators, count)
  local gone = {}
  for i = 1, count do
    if locators[i] then
      local number = block_of(locators[i])
      gone[number] = (gone[number] or 0) + 1
    end
  end
  for number, cells in pairs(gone) do
    if redis.call('HINCRBY', key('live'), number, -cells) == 0 then
      local block = cjson.decode(redis.call('HGET', key('blocks'), number))
      redis.call('ZADD', key('freed'), seconds(), block.handle)
      redis.call('HINCRBY', P, 'bytes', 0 - block.bytes) -- not -0
      redis.call('HDEL', key('live'), number)
      redis.call('HDEL', key('blocks'), number)
      freed[#freed + 1] = block.handle
    end
  end
end

-- The handles whose bytes the caller is to free: those that this call freed, and a few that another
-- client was told of so long ago that it must have died.
local function to_free()
  if bytes_kept() then
    return {} -- the save frees them when it has copied them
  end
  local stale = redis.call('ZRANGEBYSCORE', key('freed'), '-inf', seconds() - STALE_S,
    'LIMIT', 0, STALE_BLOCKS)
  for _, handle in ipairs(stale) do
    freed[#freed + 1] = handle
  end
  return freed
end

-- Changes of keys that a partition remembers.
local CHANGES_KEPT = 16384

-- Number the changes of keys, or of their tags, for who lists them again (list_changes.lua). A key
-- has the number of its last change; the oldest are forgotten.
local function note_changes(keys)
  if #keys == 0 then
    return
  end
  local first, entries = redis.call('HINCRBY', P, 'changes', #keys) - #keys, {}
  for i = 1, #keys do
    entries[2 * i - 1], entries[2 * i] = first + i, keys[i]
  end
  call('ZADD', key('changes'), entries)
  local excess = redis.call('ZCARD', key('changes')) - CHANGES_KEPT
  if excess > 0 then
    local last = redis.call('ZRANGE', key('changes'), excess - 1, excess - 1, 'WITHSCORES')
    redis.call('ZREMRANGEBYRANK', key('changes'), 0, excess - 1)
    redis.call('HSET', P, 'changes_from', last[2])
  end
end

-- The user keys of those of these rows that have one.
local function keys_of(ids)
  local found, keys = lookup('HMGET', key('key_of'), ids), {}
  for i = 1, #ids do
    keys[#keys + 1] = found[i] or nil
  end
  return keys
end

-- {{name, JSON list of the values of the rows that have it, which rows do as 1 and 0}, ...}; ''
-- instead of these if all have it. One text is made and read in half the time of one per row.
local function tags_of(ids)
  local tags = {}
  for _, name in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
    local found, values, bits = lookup('HMGET', key('tag', name), ids), {}, {}
    for i = 1, #ids do
      if found[i] then
        values[#values + 1] = found[i]
      end
    end
    for i = 1, #values < #ids and #ids or 0 do
      bits[i] = found[i] and '1' or '0'
    end
    tags[#tags + 1] = { name, '[' .. table.concat(values, ',') .. ']', table.concat(bits) }
  end
  return tags
end

-- `tags`: {{name, JSON per row}, ...}; '' leaves the row's tag as it is.
local function write_tags(tags, ids)
  for _, tag in ipairs(tags) do
    local name, values, cells = tag[1], tag[2], {}
    for row = 1, #ids do
      if values[row] ~= '' then
        cells[#cells + 1], cells[#cells + 2] = ids[row], values[row]
      end
    end
    set_rows(key('tag', name), cells)
    redis.call('SADD', key('tagnames'), name)
  end
end

