-- What is known of rows, named by id, by user key, or page by page. Read only.
-- ARGV     cells (how many one call may look at: with many fields it answers for fewer rows)
--          one of: ids (ranges) | keys | after (the next rows by id, for listing)
--          fields (optional; without it every field), task (optional: consumption wanted),
--          groups (true: they are wanted)
-- Returns  code ok: ids (0 for an unknown key), keys ('' where a row has none), tags (as
--          tags_of gives them), fields ({name, schema JSON, string of 1 and 0 per row}, ...),
--          states (per row the first letter of leased, consumed or aside, else -), groups
--          ('=<group>', or ''). Of rows named in the call the first #ids; more (rows are left)
--          code no_partition
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
local names = args.fields or redis.call('HKEYS', key('schema'))
local tags = redis.call('SCARD', key('tagnames'))
local most = math.max(1, math.floor(args.cells / (3 + #names + tags)))

local ids, more
if args.keys then
  more = #args.keys > most
  ids = lookup('HMGET', key('keys'), head(args.keys, most))
  for i = 1, #ids do
    ids[i] = ids[i] or '0'
  end
elseif args.ids then
  ids = expand(args.ids)
  more = #ids > most
  head(ids, most)
else
  ids = redis.call('ZRANGEBYSCORE', key('samples'), string.format('(%d', args.after), '+inf',
    'LIMIT', 0, most)
  more = #ids == most
end

local function bits(values)
  for i = 1, #ids do
    values[i] = values[i] and '1' or '0'
  end
  return table.concat(values)
end

local function states_of(task)
  local states = lookup('HMGET', key('task', task), ids)
  for i = 1, #ids do
    states[i] = states[i] and string.sub(states[i], 1, 1) or '-'
  end
  return table.concat(states)
end

local function groups_of()
  local groups = lookup('HMGET', key('group'), ids)
  for i = 1, #ids do
    groups[i] = groups[i] and '=' .. groups[i] or ''
  end
  return groups
end

local fields = {}
for i, name in ipairs(names) do
  local schema = redis.call('HGET', key('schema'), name)
  fields[i] = { name, schema or '', bits(lookup('HMGET', key('field', name), ids)) }
end
local numbers, keys = {}, lookup('HMGET', key('key_of'), ids)
for i = 1, #ids do
  numbers[i], keys[i] = tonumber(ids[i]), keys[i] or ''
end
return cmsgpack.pack({
  code = 'ok',
  more = more,
  ids = numbers,
  keys = keys,
  tags = tags_of(ids),
  fields = fields,
  states = args.task and states_of(args.task) or '',
  groups = args.groups and groups_of() or {},
})
