-- Where the bytes of these rows are. Read only.
-- ARGV     ids (ranges; a row may stand twice), fields
-- Returns  code ok: columns (per field: the index of an earlier field with the same locators, or
--          runs {block number, row, count, ...}), blocks ({number, handle}, ...)
--          code no_partition | unknown (ids) | not_ready (field, ids)
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
local ids = expand(args.ids)

local function same(a, b)
  for i = 1, #ids do
    if a[i] ~= b[i] then
      return false
    end
  end
  return true
end

local blocks, seen = {}, {}
local function runs_of(locators)
  local runs, last, expected, locator, number, zero = {}, nil, nil, nil, nil, nil
  for i = 1, #ids do
    if locators[i] ~= locator then
      locator = locators[i]
      number, zero = string.match(locator, '^(%d+)@(-?%d+)$')
    end
    local row = ids[i] - zero
    if number == last and row == expected then
      runs[#runs] = runs[#runs] + 1
    else
      runs[#runs + 1], runs[#runs + 2], runs[#runs + 3] = tonumber(number), row, 1
      if not seen[number] then
        seen[number] = true
        local block = cjson.decode(redis.call('HGET', key('blocks'), number))
        blocks[#blocks + 1] = { tonumber(number), block.handle }
      end
    end
    last, expected = number, row + 1
  end
  return runs
end

local columns, found = {}, {}
for f, field in ipairs(args.fields) do
  found[f] = lookup('HMGET', key('field', field), ids)
  -- Fields of one block have equal locators: send them once.
  for earlier = 1, f - 1 do
    if type(columns[earlier]) == 'table' and same(found[earlier], found[f]) then
      columns[f] = earlier
      break
    end
  end
  if not columns[f] then
    local lacking = {}
    for i = 1, #ids do
      if not found[f][i] then
        lacking[#lacking + 1] = ids[i]
      end
    end
    if #lacking > 0 then
      local _, missing = known_and_unknown(ids)
      if #missing > 0 then
        return refuse('unknown', missing)
      end
      return refuse('not_ready', lacking, { field = field })
    end
    columns[f] = runs_of(found[f])
  end
end
return cmsgpack.pack({ code = 'ok', columns = columns, blocks = blocks })
