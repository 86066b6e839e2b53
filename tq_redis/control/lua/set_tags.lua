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
local _, missing = known_and_unknown(ids)
if #missing > 0 then
  return refuse('unknown', missing)
end
for _, name in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
  call('HDEL', key('tag', name), ids)
end
write_tags(args.tags, ids)
note_changes(keys_of(ids))
touch()
return finish({ code = 'ok' })
