-- Blocks are gone with their store: cells that lie in them are not produced any more, and the tasks
-- that wrote them may claim these rows again. What was written again since, into other blocks, stays,
-- and so does what other tasks claimed.
-- ARGV     request, request_ttl, idle_ttl, ids (ranges, distinct; unknown rows are passed over),
--          fields (distinct), handles (of the blocks), cells (how many one call may look at: where
--          there are many fields, it deals with the first few rows only)
-- Returns  code ok: lost ({field, ids (ranges)}, ...: cells that were dropped), tasks ({task, ids
--          (ranges)}, ...: rows that it may claim again), left (ids (ranges): rows with cells that no
--          task will write again), freed (handles to free), done (how many of the rows named were
--          dealt with)
local replayed = replay()
if replayed then
  return replayed
end
local ids = expand(args.ids)
if not partition_exists() then
  return cmsgpack.pack({ code = 'ok', done = #ids })
end
even_when_full()
local known = indexes()
local columns = 12 + 2 * #args.fields -- a row may have a block and a claim of its own
for _, index in pairs(known) do
  columns = columns + 2 + #index.fields
end
head(ids, math.max(1, math.floor(args.cells / columns)))

-- 1. Which cells lie in the blocks? `gone`: block number -> its record, or false.
local handles, gone = {}, {}
for _, handle in ipairs(args.handles) do
  handles[handle] = true
end
local function gone_block(locator)
  local number = block_of(locator)
  if gone[number] == nil then
    local block = cjson.decode(redis.call('HGET', key('blocks'), number))
    gone[number] = handles[block.handle] and block or false
  end
  return gone[number]
end

local function add(rows, id)
  if not rows.set[id] then
    rows.set[id] = true
    rows.list[#rows.list + 1] = id
  end
end
local function no_rows()
  return { list = {}, set = {} }
end

-- `dropped`: field -> row -> true; `writers`: task -> rows.
local lost, cells, dropped, writers, left = {}, 0, {}, {}, no_rows()

-- 2. They are not produced any more.
for _, field in ipairs(args.fields) do
  local locators, rows, unused = lookup('HMGET', key('field', field), ids), {}, {}
  dropped[field] = {}
  for i = 1, #ids do
    local block = locators[i] and gone_block(locators[i])
    if block then
      rows[#rows + 1], unused[#unused + 1] = ids[i], locators[i]
      dropped[field][ids[i]] = true
      local rows_of = left
      if block.task then
        rows_of = writers[block.task] or no_rows()
        writers[block.task] = rows_of
      end
      add(rows_of, ids[i])
    end
  end
  if #rows > 0 then
    redis.call('HINCRBY', P, 'produced:' .. field, 0 - call('HDEL', key('field', field), rows))
    release_cells(unused, #unused)
    lost[#lost + 1] = { field, to_ranges(rows) }
    cells = cells + #rows
  end
end
if cells == 0 then
  return finish({ code = 'ok', done = #ids })
end
redis.call('HINCRBY', P, 'lost', cells)

-- 3. Nobody can claim them for their fields, and those who wrote them can, to do it again.
for name, index in pairs(known) do
  local rows = {}
  for _, id in ipairs(ids) do
    local lacks = false
    for _, field in ipairs(index.fields) do
      lacks = lacks or (dropped[field] and dropped[field][id])
    end
    rows[#rows + 1] = lacks and id or nil
  end
  drop_ready(name, index, rows)
end
local tasks = {}
for task, rows in pairs(writers) do
  local again, aside = work_again(task, rows.list)
  if #again > 0 then
    tasks[#tasks + 1] = { task, to_ranges(again) }
  end
  for _, id in ipairs(aside) do
    add(left, id)
  end
end
event('lost', 'cells', cells)
touch()
return finish({ code = 'ok', lost = lost, tasks = tasks, left = to_ranges(left.list),
  freed = to_free(), done = #ids })
