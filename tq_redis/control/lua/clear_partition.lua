-- Forget a partition. It is gone for everybody when this returns; what is left is the list of its
-- blocks, in the trash until a client has freed their bytes.
-- ARGV     request, request_ttl, idle_ttl
-- Returns  code ok: trash (generations whose blocks are to be freed; also of clears that failed
--          half way)
local replayed = replay()
if replayed then
  return replayed
end
local generation = redis.call('HGET', P, 'generation')
if not generation then
  return cmsgpack.pack({ code = 'ok', trash = redis.call('SMEMBERS', key('trash')) })
end

local names = partition_keys()
local kept = {
  [key('blocks')] = key('trash', generation),
  [key('freed')] = key('trash', generation, 'freed'),
}
-- Redis lets UNLINK pass when its memory is full, and then all that follows.
for _, name in ipairs(names) do
  if kept[name] and redis.call('EXISTS', name) == 1 then
    redis.call('RENAME', name, kept[name])
    redis.call('EXPIRE', kept[name], args.idle_ttl)
  else
    redis.call('UNLINK', name)
  end
end
redis.call('SADD', key('trash'), generation)
redis.call('EXPIRE', key('trash'), args.idle_ttl)
return finish({ code = 'ok', trash = redis.call('SMEMBERS', key('trash')) })
