-- Write samples in one atomic step: new rows or existing ones, their columns, keys, groups, tags.
-- ARGV     request, request_ttl, idle_ttl, now (seconds), overwrite (bool)
--          one of: ids (ranges of existing rows)
--                  first, count (new rows), optional keys (a user key per row: upsert; `first`
--                  starts the reserved ids for keys not seen yet), groups (a group per row)
--          blocks: {handle, bytes, first row of the put, rows, {field...}, {dtype...}}
--          schema: {field, JSON, field, JSON, ...}
--          tags: {{name, JSON per row...}}; an empty string leaves that row's tag as it is
-- Returns  code ok: ids (ranges), freed (handles to free), created (the partition is new)
--          code no_partition | unknown (ids) | conflict (field, old, new, ids): nothing was written
local replayed = replay()
if replayed then
  return replayed
end

-- 1. Which rows?
local ids, fresh = nil, {}
if args.ids then
  if not partition_exists() then
    return cmsgpack.pack({ code = 'no_partition' })
  end
  ids = expand(args.ids)
  local missing = unknown(ids)
  if #missing > 0 then
    return cmsgpack.pack({ code = 'unknown', ids = missing })
  end
else
  ids = {}
  local known = args.keys and lookup('HMGET', key('keys'), args.keys) or {}
  local next_id = args.first
  for row = 1, args.count do
    local id = tonumber(known[row] or nil)
    if not id then
      id = next_id
      next_id = next_id + 1
      fresh[#fresh + 1] = row
    end
    ids[row] = id
  end
end
local all_fresh = #fresh == #ids

-- 2. May the columns be written? `old` keeps the locators that they replace.
local old = {}
for b, block in ipairs(args.blocks) do
  old[b] = {}
  for f, field in ipairs(block[5]) do
    local rows = {}
    if not all_fresh then
      for row = 1, block[4] do
        rows[row] = ids[block[3] + row]
      end
    end
    old[b][f] = lookup('HMGET', key('field', field), rows)
    local dtypes = {}
    for row, locator in ipairs(old[b][f]) do
      if locator and not args.overwrite then
        local number = string.match(locator, '^%d+')
        if not dtypes[number] then
          dtypes[number] = cjson.decode(redis.call('HGET', key('blocks'), number)).dtypes
        end
        if dtypes[number][field] ~= block[6][f] then
          return cmsgpack.pack({ code = 'conflict', field = field, old = dtypes[number][field],
            new = block[6][f], ids = { rows[row] } })
        end
      end
    end
  end
end

-- 3. Register new rows.
local created = not partition_exists()
if created then
  redis.call('HSET', P, 'samples', 0, 'bytes', 0, 'generation', args.first,
    'created_at', args.now)
end
if #fresh > 0 then
  local samples, keys, key_of, group = {}, {}, {}, {}
  for _, row in ipairs(fresh) do
    local id = ids[row]
    samples[#samples + 1], samples[#samples + 2] = id, id
    if args.keys then
      keys[#keys + 1], keys[#keys + 2] = args.keys[row], id
      key_of[#key_of + 1], key_of[#key_of + 2] = id, args.keys[row]
    end
    if args.groups then
      local name = args.groups[row]
      group[#group + 1], group[#group + 2] = id, name
      local members = redis.call('HGET', key('members'), name)
      local text = string.format('%.0f', id)
      redis.call('HSET', key('members'), name, members and members .. ',' .. text or text)
    end
  end
  call('ZADD', key('samples'), samples)
  call('HSET', key('keys'), keys)
  call('HSET', key('key_of'), key_of)
  call('HSET', key('group'), group)
  redis.call('HINCRBY', P, 'samples', #fresh)
end

-- 4. Columns: locators, live cells, counters.
local wrote = {}
for b, block in ipairs(args.blocks) do
  local handle, bytes, first, count, fields, dtypes = unpack(block)
  local number = redis.call('HINCRBY', key('live'), 'next', 1)
  local record = { handle = handle, bytes = bytes, dtypes = {} }
  for f, field in ipairs(fields) do
    record.dtypes[field] = dtypes[f]
    local cells = {}
    for row = 1, count do
      cells[2 * row - 1] = ids[first + row]
      cells[2 * row] = number .. ':' .. (row - 1)
    end
    local added = call('HSET', key('field', field), cells)
    redis.call('HINCRBY', P, 'produced:' .. field, added)
    wrote[field] = true
  end
  redis.call('HSET', key('blocks'), number, cjson.encode(record))
  redis.call('HSET', key('live'), number, count * #fields)
  redis.call('HINCRBY', P, 'bytes', bytes)
end
for b, block in ipairs(args.blocks) do
  for f = 1, #block[5] do
    release_cells(old[b][f], #old[b][f])
  end
end
if #args.schema > 0 then
  redis.call('HSET', key('schema'), unpack(args.schema))
end

-- 5. Tags.
for _, tag in ipairs(args.tags) do
  local cells = {}
  for row = 1, #ids do
    if tag[2][row] ~= '' then
      cells[#cells + 1], cells[#cells + 2] = ids[row], tag[2][row]
    end
  end
  call('HSET', key('tag', tag[1]), cells)
  redis.call('SADD', key('tagnames'), tag[1])
end

-- 6. What can be claimed now? Rows that an index has not been built up to are left to the build.
if next(wrote) then
  for task, definition in pairs(task_definitions()) do
    local concerned, every = false, {}
    for _, field in ipairs(definition.fields) do
      concerned = concerned or wrote[field]
    end
    if concerned then
      for _, id in ipairs(ids) do
        if definition.done or id <= definition.built then
          every[#every + 1] = id
        end
      end
      local able = claimable(task, definition.fields, every, {})
      add_ready(task, definition.group_size, able)
    end
  end
end

event('put', 'rows', #ids)
touch()
local ranges = {}
for _, id in ipairs(ids) do
  if #ranges > 0 and ranges[#ranges - 1] + ranges[#ranges] == id then
    ranges[#ranges] = ranges[#ranges] + 1
  else
    ranges[#ranges + 1], ranges[#ranges + 2] = id, 1
  end
end
return finish({ code = 'ok', created = created, ids = ranges, freed = redis.call('SMEMBERS', key('freed')) })
