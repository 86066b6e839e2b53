-- Forgetting a partition at once, and its bytes later.

-- Forget the partition that is there, if there is one. The list of its blocks stays in the trash
-- until a client has freed their bytes.
local function discard_partition()
  local generation = redis.call('HGET', P, 'generation')
  if not generation then
    return
  end
  local kept = {
    [key('blocks')] = key('trash', generation),
    [key('freed')] = key('trash', generation, 'freed'),
  }
  local of_save = bytes_kept() and { [key('frozen')] = true, [key('thaws')] = true } or {}
  -- Redis lets UNLINK pass when its memory is full, and then all that follows.
  for _, name in ipairs(partition_keys()) do
    if kept[name] and redis.call('EXISTS', name) == 1 then
      redis.call('RENAME', name, kept[name])
      redis.call('EXPIRE', kept[name], args.idle_ttl)
    elseif not of_save[name] then
      redis.call('UNLINK', name)
    end
  end
  redis.call('SADD', key('trash'), generation)
  redis.call('EXPIRE', key('trash'), args.idle_ttl)
end

-- Generations whose blocks are to be freed; also of clears that failed half way.
local function trash()
  if bytes_kept() then
    return {} -- the save frees them when it has copied them
  end
  return redis.call('SMEMBERS', key('trash'))
end
