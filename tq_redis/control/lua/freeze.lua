-- Hold a partition still for a save: every verb that would write answers `frozen`. Then let them go
-- on, at first without bytes being freed, so that the save can copy them.
-- ARGV     by (the save), level (all: no verb writes; keep: no bytes are freed; none), hold
--          (milliseconds; it ends by itself after that, if the save does not ask again), first (true:
--          the save does not hold it yet). A save can only go down in level.
-- Returns  code ok | no_partition | frozen: another save holds it (the caller waits)
--          code lost: the save held it no longer, so what it has read may not fit together
local name = key('frozen')
local level, left = held_by_save()
local by, was, paused = unpack(redis.call('HMGET', name, 'by', 'level', 'paused'))
local mine = by == args.by
if args.first and level and not mine then
  return come_back(left)
elseif args.level == 'none' and mine and was == 'none' then
  return cmsgpack.pack({ code = 'ok' }) -- sent twice
elseif not args.first and not (level and mine) then
  return cmsgpack.pack({ code = 'lost' })
elseif not partition_exists() and (args.first or args.level == 'none') then
  redis.call('UNLINK', name, key('thaws')) -- cleared while its bytes were kept
  return cmsgpack.pack({ code = args.first and 'no_partition' or 'ok' })
end
local now = milliseconds()
paused = now - lease_clock()
local lower = level == 'keep' and args.level == 'all' and level or args.level -- that one came late
redis.call('HDEL', name, 'ends') -- Redis lets this pass when its memory is full, and what follows
redis.call('HSET', name, 'by', args.by, 'level', lower, 'since', now, 'ends', now + args.hold,
  'paused', paused)
if lower ~= 'all' and lower ~= level then
  redis.call('XADD', key('thaws'), 'MAXLEN', 1, '*', 'level', lower)
end
local expires_at = redis.call('HGET', P, 'expires_at')
if expires_at then
  redis.call('EXPIREAT', name, expires_at)
  redis.call('EXPIREAT', key('thaws'), expires_at)
end
return cmsgpack.pack({ code = 'ok' })
