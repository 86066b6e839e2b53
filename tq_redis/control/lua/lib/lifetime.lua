-- When the partition's keys expire.

-- Every key of the partition but the trash and the replies.
local function partition_keys()
  local names = { P }
  for _, suffix in ipairs({ 'samples', 'schema', 'blocks', 'live', 'freed', 'indexes', 'group',
      'keys', 'key_of', 'changes', 'tagnames', 'events', 'waiters', 'frozen', 'thaws', 'admitted',
      'evicted' }) do
    names[#names + 1] = key(suffix)
  end
  for _, field in ipairs(redis.call('HKEYS', key('schema'))) do
    names[#names + 1] = key('field', field)
  end
  for name, index in pairs(indexes()) do
    for _, suffix in ipairs({ 'task', 'claims', 'leases', 'deliveries', 'draws', 'drawn', 'making' }) do
      names[#names + 1] = key(suffix, index.task)
    end
    names[#names + 1] = key('ready', name)
    if index.group_size > 0 then
      names[#names + 1] = key('ready', name, 'count')
      names[#names + 1] = key('ready', name, 'groups')
    end
  end
  for _, tag in ipairs(redis.call('SMEMBERS', key('tagnames'))) do
    names[#names + 1] = key('tag', tag)
  end
  return names
end

-- Prolong the partition's lifetime. All its keys expire in the same instant, at the earliest
-- idle_ttl from now; a sixteenth more, so that few calls have to write it to every key.
local function touch()
  local soonest = seconds() + 1 + args.idle_ttl
  local at = tonumber(redis.call('HGET', P, 'expires_at') or 0)
  local prolong = at < soonest
  if prolong then
    at = soonest + math.floor(args.idle_ttl / 16)
    redis.call('HSET', P, 'expires_at', at)
  end
  for _, name in ipairs(partition_keys()) do
    if prolong or redis.call('TTL', name) == -1 then
      redis.call('EXPIREAT', name, at)
    end
  end
end

