-- Forget a partition. It is gone for everybody when this returns; what is left is the list of its
-- blocks, in the trash until a client has freed their bytes.
-- ARGV     request, request_ttl, idle_ttl
--          optional generation: the limits of its tasks stay, in a partition made anew
-- Returns  code ok: trash (generations whose blocks are to be freed; also of clears that failed
--          half way)
local replayed = replay()
if replayed then
  return replayed
end
if not partition_exists() then
  return cmsgpack.pack({ code = 'ok', trash = trash() })
end
local limits = args.generation and redis.call('HGET', P, 'limits')
discard_partition()
if limits then
  forget_indexes()
  create(args.generation)
  redis.call('HSET', P, 'limits', limits)
  touch()
end
return finish({ code = 'ok', trash = trash() })
