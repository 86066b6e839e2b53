-- Say how many samples a task may leave unconsumed, or that there is no limit.
-- ARGV     request, request_ttl, idle_ttl, generation (for a partition that is not there yet), task,
--          samples and when_full (wait: puts do; evict: the oldest samples make room); without them
--          there is no limit
-- Returns  code ok: created (the partition is new)
--          nothing was written: code waiting (consumer, count): one waits for more samples than that
local replayed = replay()
if replayed then
  return replayed
end
local text = redis.call('HGET', P, 'limits')
local limits = text and cjson.decode(text) or {}
if not args.samples and not limits[args.task] then
  return finish({ code = 'ok', created = false })
end
local waiters = args.samples and redis.call('HGETALL', key('waiters')) or {}
for i = 2, #waiters, 2 do
  local waiter = cjson.decode(waiters[i])
  if waiter.task == args.task and waiter.count > args.samples and waiter.ends > milliseconds() then
    return cmsgpack.pack({ code = 'waiting', consumer = waiter.consumer, count = waiter.count })
  end
end
local created = not partition_exists()
if created then
  create(args.generation)
end
limits[args.task] = args.samples and { samples = args.samples, when_full = args.when_full } or nil
if next(limits) then
  redis.call('HSET', P, 'limits', cjson.encode(limits))
else
  redis.call('HDEL', P, 'limits')
  redis.call('UNLINK', key('admitted'))
end
event('limit', 'task', args.task)
touch()
return finish({ code = 'ok', created = created })
