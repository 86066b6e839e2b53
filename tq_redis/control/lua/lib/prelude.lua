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

local function key(...)
  return P .. ':' .. table.concat({ ... }, ':')
end

-- {start, count, start, count, ...} -> {'id', 'id', ...}
local function expand(ranges)
  local ids = {}
  for i = 1, #ranges, 2 do
    for id = ranges[i], ranges[i] + ranges[i + 1] - 1 do
      ids[#ids + 1] = string.format('%d', id)
    end
  end
  return ids
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

local function partition_exists()
  return redis.call('EXISTS', P) == 1
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

local function seconds()
  return tonumber(redis.call('TIME')[1])
end

-- `kind` is put, claim or clear. Waiters block on this stream.
local function event(kind, ...)
  redis.call('XADD', key('events'), 'MAXLEN', '~', 256, '*', 'kind', kind, ...)
end

local function last_event()
  local entries = redis.call('XREVRANGE', key('events'), '+', '-', 'COUNT', 1)
  return entries[1] and entries[1][1] or '0-0'
end

-- The stored reply if this request ran before, else false.
local function replay()
  return redis.call('GET', key('req', args.request))
end

-- Store the reply for a replay and return it.
local function finish(reply)
  local packed = cmsgpack.pack(reply)
  redis.call('SET', key('req', args.request), packed, 'EX', args.request_ttl)
  return packed
end
