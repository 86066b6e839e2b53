-- Let a put make new rows under the limits of all tasks: room is kept for it until it has made them.
-- Where a limit says so, the oldest samples that its task has not claimed make room.
-- ARGV     request, request_ttl, idle_ttl, put (a name for it), rows (0: it needs its room no longer),
--          lifetime (milliseconds for which room is kept), cells (that one call may drop, or look at
--          to complete an index)
-- Returns  code ok: evicted ({task, ids, how many it lost so far}, ...), freed (handles to free)
--          code again: likewise; there is more to do. Call again, as another request
--          no room is kept: code unlimited (no task has a limit) | ended (made) | unexpected (made,
--          expected, more) | too_many (task, limit): more rows than it ever lets
--          code full (task, limit, unconsumed, held, event (wait after this one), retry (milliseconds
--          until another put's time for its room ends; -1: none has any))
local replayed = replay()
if replayed then
  return replayed
end
if args.rows == 0 then
  if redis.call('HDEL', key('admitted'), args.put) == 1 then
    event('room')
    touch()
  end
  return finish({ code = 'ok' })
end
local limits, made, expected, ended =
  unpack(redis.call('HMGET', P, 'limits', 'made', 'expected', 'ended'))
if not limits then
  return cmsgpack.pack({ code = 'unlimited' })
end
local refusal = not_to_come(args.rows, made, expected, ended)
if refusal then
  return refusal
end

-- 1. Room that is kept for other puts, also of producers that died, for a while.
local kept, retry, others = 0, -1, redis.call('HGETALL', key('admitted'))
for i = 1, #others, 2 do
  local rows, ends = room_in(others[i + 1])
  if rows == 0 then
    redis.call('HDEL', key('admitted'), others[i])
  elseif others[i] ~= args.put then
    local left = ends - milliseconds()
    kept, retry = kept + rows, retry == -1 and left or math.min(retry, left)
  end
end

-- 2. Which limits are in the way? Two indexes without fields say what a task has not claimed, by id
--    and by group.
local function unclaimed(task, group_size)
  local name = string.format('%s:%d:', task, group_size)
  return built(name, task, {}, group_size) and name
end

local over, excess = {}, {}
for task, limit in pairs(cjson.decode(limits)) do
  local samples = unconsumed(task)
  local more = samples + kept + args.rows - limit.samples
  if args.rows > limit.samples then
    return cmsgpack.pack({ code = 'too_many', task = task, limit = limit.samples })
  elseif more > 0 then
    local evicts = limit.when_full == 'evict'
    local index = evicts and unclaimed(task, 0)
    if evicts and not index then
      return cmsgpack.pack({ code = 'again' })
    elseif not index or redis.call('ZCARD', key('ready', index)) < more then
      return cmsgpack.pack({ code = 'full', task = task, limit = limit.samples, retry = retry,
        unconsumed = samples, held = tonumber(redis.call('HGET', P, 'claimed:' .. task) or 0),
        event = last_event() })
    end
    over[#over + 1], excess[task] = task, more
  end
end

-- 3. Make room. Groups go as a whole, so that nobody waits for the rest of one. nil: call again.
local function oldest(task, count)
  local found = redis.call('ZRANGE', key('ready', unclaimed(task, 0)), 0, count - 1)
  local groups, ids, taken = lookup('HMGET', key('group'), found), {}, {}
  for i = 1, #found do
    local group = groups[i]
    if #ids >= count then
      break
    elseif not group then
      ids[#ids + 1] = found[i]
    elseif not taken[group] then
      local index = unclaimed(task, 1)
      if not index then
        return nil
      end
      taken[group] = true
      for _, member in ipairs(first_of(index, group, -1)) do
        ids[#ids + 1] = id_of(member)
      end
    end
  end
  return ids
end

local EVICTED_KEPT = 4096
local function evict(task, ids)
  local entries, numbers = {}, {}
  for i = 1, #ids do
    entries[2 * i - 1], entries[2 * i] = ids[i], task .. ':' .. ids[i]
    numbers[i] = tonumber(ids[i])
  end
  local removed = forget_rows(ids)
  call('ZADD', key('evicted'), entries)
  redis.call('ZREMRANGEBYRANK', key('evicted'), 0, -1 - EVICTED_KEPT)
  event('evict', 'task', task, 'rows', removed)
  return { task, numbers, redis.call('HINCRBY', P, 'evicted:' .. task, removed) }
end

local task, evicted, done = over[1], {}, true
if task then
  local ids = oldest(task, math.min(excess[task], rows_to_forget(args.cells)))
  if ids then
    evicted = { evict(task, ids) }
  end
  done = ids and #ids >= excess[task] and #over == 1
end
if done then
  keep_room(args.put, args.rows, milliseconds() + args.lifetime)
end
touch()
return finish({ code = done and 'ok' or 'again', evicted = evicted, freed = to_free() })
