-- Say how many samples will be made in a partition, or that no more will.
-- ARGV     request, request_ttl, idle_ttl, generation (for a partition that is not there yet),
--          either samples (how many in all) or ended (true)
-- Returns  code ok: created (the partition is new)
--          nothing was written: code ended (made) | unexpected (made): more exist already
local replayed = replay()
if replayed then
  return replayed
end
local made, ended = unpack(redis.call('HMGET', P, 'made', 'ended'))
made = tonumber(made or 0)
if args.samples and ended then
  return refuse('ended', {}, { made = made })
elseif args.samples and args.samples < made then
  return refuse('unexpected', {}, { made = made })
end
local created = not partition_exists()
if created then
  create(args.generation)
end
if args.ended then
  redis.call('HSETNX', P, 'ended', seconds())
else
  redis.call('HSET', P, 'expected', args.samples)
end
event(args.ended and 'end' or 'expect')
touch()
return finish({ code = 'ok', created = created })
