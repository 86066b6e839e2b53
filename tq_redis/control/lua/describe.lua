-- What is known of rows, named by id, by user key, or page by page. Read only.
-- ARGV     one of: ids (ranges) | keys | after, count (the next rows by id, for listing)
--          fields (optional; without it every field), task (optional: consumption wanted)
-- Returns  code ok: ids, keys ('' where a row has none), tags ({name, JSON or '' per row}, ...),
--          fields ({name, schema JSON, string of 1 and 0 per row}, ...), consumed (likewise)
--          code no_partition
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
local ids = {}
if args.keys then
  for i, id in ipairs(lookup('HMGET', key('keys'), args.keys)) do
    ids[i] = tonumber(id or 0)
  end
elseif args.ids then
  ids = expand(args.ids)
else
  for i, id in ipairs(redis.call('ZRANGEBYSCORE', key('samples'),
      string.format('(%.0f', args.after), '+inf', 'LIMIT', 0, args.count)) do
    ids[i] = tonumber(id)
  end
end

local function or_empty(values)
  for i = 1, #ids do
    values[i] = values[i] or ''
  end
  return values
end

local function bits(values)
  for i = 1, #ids do
    values[i] = values[i] and '1' or '0'
  end
  return table.concat(values)
end

local names = args.fields or redis.call('HKEYS', key('schema'))
local fields = {}
for i, name in ipairs(names) do
  local schema = redis.call('HGET', key('schema'), name)
  fields[i] = { name, schema or '', bits(lookup('HMGET', key('field', name), ids)) }
end
return cmsgpack.pack({
  code = 'ok',
  ids = ids,
  keys = or_empty(lookup('HMGET', key('key_of'), ids)),
  tags = tags_of(ids),
  fields = fields,
  consumed = args.task and bits(lookup('HMGET', key('task', args.task), ids)) or '',
})
