-- Shared by every verb; put in front of it when the script is loaded.
-- KEYS[1]  the key that the verb works on: a partition's summary hash tq:<ns>:{P} (for swap_owner
--          the owner key). All other keys are this one plus a suffix (keys.py lists them), so
--          they share its hash tag and its cluster slot.
-- ARGV[1]  the verb's arguments, one msgpack map. Names in it are percent-encoded already.
-- Returns  one msgpack map; `code` says what happened.
--
-- Inside a script sample ids are text: Redis takes and gives them so, and turning numbers into
-- text again and again is what a script would spend most of its time on.
local P = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])

-- Values given to one redis.call: Lua's C stack holds about 8,000.
local CHUNK = 4000

local PREFIX = P .. ':'
local function key(one, two, three)
  if three then
    return PREFIX .. one .. ':' .. two .. ':' .. three
  end
  return PREFIX .. (two and one .. ':' .. two or one)
end

-- Append the ids of `count` samples from `first` on. To add a digit to a text takes half as long as
-- to make a text of a number.
local DIGITS = { [0] = '0', '1', '2', '3', '4', '5', '6', '7', '8', '9' }
local function add_ids(ids, first, count)
  local size, tens = #ids, nil
  for i = 1, count do
    local id = first + i - 1
    local digit = id % 10
    if digit == 0 or not tens then
      tens = id < 10 and '' or string.format('%d', (id - digit) / 10)
    end
    ids[size + i] = tens .. DIGITS[digit]
  end
  return ids
end

-- {start, count, start, count, ...} -> {'id', 'id', ...}
local function expand(ranges)
  local ids = {}
  for i = 1, #ranges, 2 do
    add_ids(ids, ranges[i], ranges[i + 1])
  end
  return ids
end

-- The inverse, for ids in any order: ascending neighbours become one range.
local function to_ranges(ids)
  local ranges, expected = {}, nil
  for i = 1, #ids do
    local id = tonumber(ids[i])
    if id == expected then
      ranges[#ranges] = ranges[#ranges] + 1
    else
      ranges[#ranges + 1], ranges[#ranges + 2] = id, 1
    end
    expected = id + 1
  end
  return ranges
end

-- call(command, name, {value, value, ...}) in chunks; the integer replies are added up.
local function call(command, name, values)
  local total = 0
  for first = 1, #values, CHUNK do
    local last = math.min(first + CHUNK - 1, #values)
    total = total + redis.call(command, name, unpack(values, first, last))
  end
  return total
end

-- One reply per value, in order; false where there is none.
local function lookup(command, name, values)
  if #values <= CHUNK then
    return #values > 0 and redis.call(command, name, unpack(values)) or {}
  end
  local found = {}
  for first = 1, #values, CHUNK do
    local last = math.min(first + CHUNK - 1, #values)
    for i, value in ipairs(redis.call(command, name, unpack(values, first, last))) do
      found[first + i - 1] = value
    end
  end
  return found
end

-- Write a hash that has an entry per row: {'id', value, 'id', value, ...}. Returns how many are new.
-- Redis keeps a small hash as a list, which it searches from its start for each row. A long value
-- turns the hash into a table, which it stays.
local LONG = string.rep('-', 65)
local function set_rows(name, entries)
  if #entries == 0 then
    return 0
  end
  local is_new = redis.call('EXISTS', name) == 0
  if is_new then
    redis.call('HSET', name, LONG, LONG)
  end
  local added = call('HSET', name, entries)
  if is_new then
    redis.call('HDEL', name, LONG)
  end
  return added
end

-- What ZADD gets for a set ordered by id: {'id', 'id', ...} -> {'id', 'id', 'id', 'id', ...}.
-- A put adds the same rows to several sets.
local last_ids, last_entries
local function by_id(ids)
  if ids ~= last_ids then
    last_ids, last_entries = ids, {}
    for i = 1, #ids do
      last_entries[2 * i - 1], last_entries[2 * i] = ids[i], ids[i]
    end
  end
  return last_entries
end

local function seconds()
  return tonumber(redis.call('TIME')[1])
end

local function milliseconds()
  local time = redis.call('TIME')
  return 1000 * time[1] + math.floor(time[2] / 1000)
end

local function partition_exists()
  return redis.call('EXISTS', P) == 1
end

-- `generation` is a sample id that was drawn for this, so no two partitions have the same.
local function create(generation)
  redis.call('HSET', P, 'samples', 0, 'bytes', 0, 'generation', generation, 'created_at', seconds())
end

-- The first `most` of `values`.
local function head(values, most)
  for i = #values, most + 1, -1 do
    values[i] = nil
  end
  return values
end

-- Of `ids`, those that the partition has and those that it does not have.
local function known_and_unknown(ids)
  local scores, known, missing = lookup('ZMSCORE', key('samples'), ids), {}, {}
  for i = 1, #ids do
    local list = scores[i] and known or missing
    list[#list + 1] = ids[i]
  end
  return known, missing
end

-- A refusal that names rows.
local function refuse(code, ids, more)
  local reply = more or {}
  reply.code, reply.ids = code, {}
  for i = 1, #ids do
    reply.ids[i] = tonumber(ids[i])
  end
  return cmsgpack.pack(reply)
end

-- Waiters block on this stream; connection.py knows which kinds are no news to them.
local function event(kind, ...)
  redis.call('XADD', key('events'), 'MAXLEN', '~', 256, '*', 'kind', kind, ...)
end

local function last_event()
  local entries = redis.call('XREVRANGE', key('events'), '+', '-', 'COUNT', 1)
  return entries[1] and entries[1][1] or '0-0'
end

-- How a save holds the partition (freeze.lua): all or keep, and for how many milliseconds at most;
-- nil if none does.
local function held_by_save()
  local level, ends = unpack(redis.call('HMGET', key('frozen'), 'level', 'ends'))
  local left = (level == 'all' or level == 'keep') and tonumber(ends) - milliseconds() or 0
  if left > 0 then
    return level, left
  end
end

-- The bytes of blocks must stay, also of those that are freed: a save copies them.
local function bytes_kept()
  return held_by_save() == 'keep'
end

-- The reply to a call that has to wait until the save goes on, for `left` milliseconds at most.
local function come_back(left)
  local last = redis.call('XREVRANGE', key('thaws'), '+', '-', 'COUNT', 1)
  return cmsgpack.pack({ code = 'frozen', frozen = { last[1] and last[1][1] or '0-0', left } })
end

-- What a verb that would write answers while a save reads the partition; else false.
local function frozen()
  local level, left = held_by_save()
  return level == 'all' and come_back(left)
end

-- Milliseconds on the clock that leases run by: it stands still while no verb may write.
local function lease_clock()
  local level, since, ends, paused =
    unpack(redis.call('HMGET', key('frozen'), 'level', 'since', 'ends', 'paused'))
  local now, pause = milliseconds(), tonumber(paused or 0)
  if level == 'all' then
    pause = pause + math.max(0, math.min(now, tonumber(ends)) - tonumber(since))
  end
  return now - pause
end

-- How every verb that writes opens: the stored reply if this request ran before, what it answers
-- while the partition is frozen, or false: go on.
local function replay()
  return redis.call('GET', key('req', args.request)) or frozen()
end

-- Consumers go on when Redis's memory is full: it lets a script that has removed something go on.
local function even_when_full()
  redis.call('DEL', key('req', args.request))
end

-- Store the reply for a replay and return it.
local function finish(reply)
  local packed = cmsgpack.pack(reply)
  redis.call('SET', key('req', args.request), packed, 'EX', args.request_ttl)
  return packed
end
