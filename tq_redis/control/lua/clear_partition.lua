-- Forget a partition. It is gone for everybody when this returns; what is left is the list of its
-- blocks, in the trash until a client has freed their bytes.
-- ARGV     idle_ttl, generation (optional: clear only this one)
-- Returns  code ok: trash (generations whose blocks are to be freed; also of clears that failed
--          half way), handles (freed, but not yet deleted)
-- Safe to replay: a second run finds no partition and returns the same trash.
local handles = redis.call('SMEMBERS', key('freed'))
local generation = redis.call('HGET', P, 'generation')
if generation then
  local blocks, trash = key('blocks'), key('trash', generation)
  if redis.call('EXISTS', blocks) == 1 then
    redis.call('RENAME', blocks, trash)
    redis.call('EXPIRE', trash, args.idle_ttl)
    redis.call('SADD', key('trash'), generation)
  end
  for _, handle in ipairs(handles) do
    redis.call('HSET', trash, handle, cjson.encode({ handle = handle }))
    redis.call('EXPIRE', trash, args.idle_ttl)
    redis.call('SADD', key('trash'), generation)
  end
  for _, name in ipairs(partition_keys()) do
    redis.call('UNLINK', name)
  end
  redis.call('EXPIRE', key('trash'), args.idle_ttl)
end
return cmsgpack.pack({ code = 'ok', trash = redis.call('SMEMBERS', key('trash')) })
