-- Write samples in one atomic step: new rows or existing ones, their columns, keys, groups, tags.
-- ARGV     request, request_ttl, idle_ttl, overwrite (bool)
--          one of: ids (ranges of existing rows, distinct)
--                  first, count (new rows), optional keys (a user key per row, distinct: upsert;
--                  `first` starts the reserved ids for keys not seen yet), groups (a group per row)
--          blocks: {handle, bytes, first row of the put, rows, {field...}, {dtype...}, the first of
--          these rows inside the block, its number if an earlier step named it, else 0}
--          schema: {field, JSON, field, JSON, ...}
--          tags: {{name, JSON per row...}}; an empty string leaves that row's tag as it is
--          optional task: who wrote the blocks
--          optional admission: the name under which room for new rows is kept (see admit)
-- Returns  code ok: ids (ranges), freed (handles to free), created (the partition is new),
--          blocks (the number of each)
--          nothing was written: code no_partition | gone (an earlier step's block) | unknown
--          (ids) | conflict (field, old, new, ids) | ended (made) | unexpected (made, expected,
--          more): no such new rows are to come | limited: no room is kept for so many new rows
local replayed = replay()
if replayed then
  return replayed
end

-- 1. Which rows? `new` are those to be made; `places`, where they stand among all: nil where all of
-- them are new.
local ids, new, places, limited = nil, {}, nil, false
if args.ids then
  if not partition_exists() then
    return cmsgpack.pack({ code = 'no_partition' })
  end
  ids = expand(args.ids)
  local _, missing = known_and_unknown(ids)
  if #missing > 0 then
    return refuse('unknown', missing)
  end
elseif args.keys then
  ids, places = lookup('HMGET', key('keys'), args.keys), {}
  for row = 1, args.count do
    places[#places + 1] = not ids[row] and row or nil
  end
  add_ids(new, args.first, #places)
  for i, row in ipairs(places) do
    ids[row] = new[i]
  end
else
  ids = add_ids(new, args.first, args.count)
end
local all_new = #new == #ids
if #new > 0 then
  local made, expected, ended
  made, expected, ended, limited =
    unpack(redis.call('HMGET', P, 'made', 'expected', 'ended', 'limits'))
  local refusal = not_to_come(#new, made, expected, ended)
  if not refusal and limited and room_of(args.admission) < #new then
    refusal = cmsgpack.pack({ code = 'limited' })
  end
  if refusal then
    return refusal
  end
end

-- 2. May the columns be written? `replaced` are the locators that they replace.
local replaced = {}
local function conflict(field, dtype, rows, locators)
  local dtypes = {}
  for i = 1, #rows do
    local number = locators[i] and block_of(locators[i])
    if number then
      dtypes[number] = dtypes[number] or cjson.decode(redis.call('HGET', key('blocks'), number)).dtypes
      if dtypes[number][field] ~= dtype then
        return refuse('conflict', { rows[i] },
          { field = field, old = dtypes[number][field], new = dtype })
      end
    end
  end
end
if not all_new then
  for _, block in ipairs(args.blocks) do
    local rows = {}
    for row = 1, block[4] do
      rows[row] = ids[block[3] + row]
    end
    for f, field in ipairs(block[5]) do
      if redis.call('EXISTS', key('field', field)) == 1 then
        local locators = lookup('HMGET', key('field', field), rows)
        local refusal = not args.overwrite and conflict(field, block[6][f], rows, locators)
        if refusal then
          return refusal
        end
        replaced[#replaced + 1] = { locators, #rows }
      end
    end
  end
end

-- A put in several steps names one block again and again. It is gone if all rows of earlier steps
-- were cleared meanwhile.
for _, block in ipairs(args.blocks) do
  if block[8] > 0 then
    local text = redis.call('HGET', key('blocks'), block[8])
    if not text or cjson.decode(text).handle ~= block[1] then
      return cmsgpack.pack({ code = partition_exists() and 'gone' or 'no_partition' })
    end
  end
end

-- 3. Register new rows. From here on the script writes; what Redis refuses when its memory is full
--    comes first, so that it refuses the whole.
local created = not partition_exists()
if created then
  create(args.first)
end
local new_keys = {}
if #new > 0 then
  local keys, key_of, group = {}, {}, {}
  for i, row in ipairs(places or {}) do
    local name, id = args.keys[row], new[i]
    new_keys[i] = name
    keys[2 * i - 1], keys[2 * i] = name, id
    key_of[2 * i - 1], key_of[2 * i] = id, name
  end
  for i = 1, args.groups and #new or 0 do
    group[2 * i - 1], group[2 * i] = new[i], args.groups[places and places[i] or i]
  end
  call('ZADD', key('samples'), by_id(all_new and ids or new))
  set_rows(key('keys'), keys)
  set_rows(key('key_of'), key_of)
  set_rows(key('group'), group)
  redis.call('HINCRBY', P, 'samples', #new)
  redis.call('HINCRBY', P, 'made', #new)
  if limited then
    use_room(args.admission, #new)
  end
end

-- 4. Columns: locators (the same for all fields of a block), live cells, counters.
local covered, numbers_of = {}, {}
for b, block in ipairs(args.blocks) do
  local handle, bytes, first, count, fields, dtypes, offset, number = unpack(block)
  local is_new = number == 0
  if is_new then
    number = redis.call('HINCRBY', key('live'), 'next', 1)
  end
  numbers_of[b] = number
  local cells, dtype_of = {}, {}
  local zero, locator -- most rows of a put have neighbouring ids, and so one locator
  for row = 1, count do
    local id = ids[first + row]
    if not locator or not all_new and zero ~= id - row then
      zero = id - row
      locator = string.format('%d@%d', number, zero + 1 - offset)
    end
    cells[2 * row - 1], cells[2 * row] = id, locator
  end
  for f, field in ipairs(fields) do
    local added = set_rows(key('field', field), cells)
    redis.call('HINCRBY', P, 'produced:' .. field, added)
    covered[field] = (covered[field] or 0) + count
    dtype_of[field] = dtypes[f]
  end
  if is_new then
    redis.call('HSET', key('blocks'), number,
      cjson.encode({ handle = handle, bytes = bytes, dtypes = dtype_of, task = args.task }))
    redis.call('HINCRBY', P, 'bytes', bytes)
  end
  redis.call('HINCRBY', key('live'), number, count * #fields)
end
for _, cells in ipairs(replaced) do
  release_cells(cells[1], cells[2])
end
call('HSET', key('schema'), args.schema)
write_tags(args.tags, ids)
if #args.tags > 0 then
  note_changes(args.keys or keys_of(ids))
else
  note_changes(new_keys)
end

-- 5. What can be claimed now?
local has = {}
for field, count in pairs(covered) do
  has[field] = count == #ids or nil
end
for name, index in pairs(indexes()) do
  local concerned, lacking, whole = #index.fields == 0 and #new > 0, false, all_new
  for _, field in ipairs(index.fields) do
    concerned = concerned or covered[field]
    lacking = lacking or not covered[field]
    whole = whole and has[field]
  end
  -- A new row has no other field than those of this put, and no other group.
  lacking = lacking or index.group_size > 0 and not args.groups
  if concerned and not (all_new and lacking) then
    add_ready(name, index, whole and ids or claimable(index, ids, has))
  end
end

event('put', 'rows', #ids)
touch()
local ranges = all_new and { args.first, args.count } or to_ranges(ids)
return finish({ code = 'ok', created = created, ids = ranges, blocks = numbers_of,
  freed = to_free() })
