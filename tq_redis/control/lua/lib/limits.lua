-- Limits: how many samples a task may leave unconsumed, and the puts that room is kept for.

-- How many samples it may; -1: as many as it likes.
local function limit_of(task)
  local text = redis.call('HGET', P, 'limits')
  local limit = text and cjson.decode(text)[task]
  return limit and limit.samples or -1
end

-- Samples that it has not consumed, those included that it holds with a lease.
local function unconsumed(task)
  local samples, consumed, aside =
    unpack(redis.call('HMGET', P, 'samples', 'consumed:' .. task, 'set_aside:' .. task))
  return samples - (consumed or 0) - (aside or 0)
end

-- The refusal of `count` new rows that are not to come, or nil. The rest is as the summary has it.
local function not_to_come(count, made, expected, ended)
  made, expected = tonumber(made or 0), tonumber(expected or nil)
  if ended then
    return refuse('ended', {}, { made = made })
  elseif expected and made + count > expected then
    return refuse('unexpected', {}, { made = made, expected = expected, more = count })
  end
end

-- How many rows a put may still make, and until when, in ms.
local function room_in(text)
  local rows, ends = string.match(text or '', '^(%d+):(%d+)$')
  ends = tonumber(ends or 0)
  return ends > milliseconds() and tonumber(rows) or 0, ends
end

local function room_of(put)
  return room_in(put and redis.call('HGET', key('admitted'), put))
end

local function keep_room(put, rows, ends)
  redis.call('HSET', key('admitted'), put, string.format('%.0f:%.0f', rows, ends))
end

-- The put has made so many rows of those that room is kept for.
local function use_room(put, rows)
  local left, ends = room_of(put)
  if left > rows then
    keep_room(put, left - rows, ends)
  else
    redis.call('HDEL', key('admitted'), put)
  end
end
