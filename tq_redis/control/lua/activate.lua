-- Put a staged partition in the place of the one that is there, which is forgotten but for the limits
-- of its tasks.
-- ARGV     request, request_ttl, idle_ttl, token (of the load), suffixes (that were staged),
--          pages (how many they are)
-- Returns  code ok: trash (generations whose blocks are to be freed)
--          code lost: staged keys have expired, or pages are missing; nothing was done
local replayed = replay()
if replayed then
  return replayed
end
local pages = key('load', args.token)
if tonumber(redis.call('GET', pages) or 0) ~= args.pages then
  return cmsgpack.pack({ code = 'lost' })
end
for _, suffix in ipairs(args.suffixes) do
  local staged = key('load', args.token, suffix)
  if redis.call('EXISTS', staged) == 0 then
    return cmsgpack.pack({ code = 'lost' })
  end
end
local limits = redis.call('HGET', P, 'limits')
discard_partition()
for _, suffix in ipairs(args.suffixes) do
  local staged = key('load', args.token, suffix)
  local name = suffix == '' and P or key(suffix)
  redis.call('RENAME', staged, name)
end
redis.call('UNLINK', pages, key('loading'))
if limits then
  redis.call('HSET', P, 'limits', limits)
end
forget_indexes()
event('load', 'rows', redis.call('HGET', P, 'samples'))
touch()
return finish({ code = 'ok', trash = trash() })
