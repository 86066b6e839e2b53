-- Hold a partition still for a save: every verb that would write answers `frozen`. Then let them go
-- on, at first without those that free or replace bytes, so that the save can copy these.
-- ARGV     by (the save), level (all: no verb writes; keep: none frees or replaces bytes; none),
--          hold (milliseconds; it ends by itself after that, if the save does not ask again),
--          first (true: the save does not hold it yet). A save can only go down in level.
-- Returns  code ok | no_partition | frozen: another save holds it (the caller waits)
--          code lost: the save held it no longer, so what it has read may not fit together
local name = key('frozen')
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
local by, level, since, ends, paused =
  unpack(redis.call('HMGET', name, 'by', 'level', 'since', 'ends', 'paused'))
local mine = by == args.by
local active = (level == 'all' or level == 'keep') and tonumber(ends) > milliseconds()
if args.level == 'none' and mine and not active and level == 'none' then
  return cmsgpack.pack({ code = 'ok' })
elseif active and not mine and args.first then
  return frozen('frees')
elseif not args.first and not (active and mine) then
  return cmsgpack.pack({ code = 'lost' })
end
local now, was_paused = milliseconds(), milliseconds() - lease_clock()
local next_level = args.level
if active and level == 'keep' and next_level == 'all' then
  next_level = 'keep' -- sent before the save went on, and late
end
redis.call('HDEL', name, 'ends') -- Redis lets this pass when its memory is full, and what follows
redis.call('HSET', name, 'by', args.by, 'level', next_level, 'since', now,
  'ends', now + args.hold, 'paused', was_paused)
if next_level ~= 'all' then
  redis.call('XADD', key('thaws'), 'MAXLEN', 1, '*', 'level', next_level)
end
local expires_at = redis.call('HGET', P, 'expires_at')
redis.call('EXPIREAT', name, expires_at)
redis.call('EXPIREAT', key('thaws'), expires_at)
return cmsgpack.pack({ code = 'ok' })
