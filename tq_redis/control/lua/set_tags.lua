-- Give rows exactly these tags: named ones are set, all others are removed.
-- ARGV     request, request_ttl, idle_ttl, ids (ranges), tags ({name, JSON per row or ''}, ...)
-- Returns  code ok | no_partition | unknown (ids): nothing was written
local replayed = replay()
if replayed then
  return replayed
end
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
local ids = expand(args.ids)
local missing = unknown(ids)
if #missing > 0 then
  return cmsgpack.pack({ code = 'unknown', ids = missing })
end
for _, name in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
  call('HDEL', key('tag', name), ids)
end
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
touch()
return finish({ code = 'ok' })
