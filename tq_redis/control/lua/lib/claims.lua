-- Consumption records '<state>:<claim number>:<consumer>', claims, leases, and how they end.
--   leased    somebody works on the row; the claim's lease says until when
--   consumed  done for this task
--   aside     delivered too often and never acknowledged; not given out any more
-- A claim without a lease makes `consumed` records at once and is not kept.

-- Claims that one call looks at when their leases have run out.
local DUE_CLAIMS = 16

local COUNTERS = { leased = 'claimed:', consumed = 'consumed:', aside = 'set_aside:' }

local function count(state, task, change)
  if change ~= 0 then
    redis.call('HINCRBY', P, COUNTERS[state] .. task, change)
  end
end

local function record_all(task, ids, record)
  local records = {}
  for i = 1, #ids do
    records[2 * i - 1], records[2 * i] = ids[i], record
  end
  set_rows(key('task', task), records)
end

-- Of `ids`, those that this claim holds in one of two states, and those that it does not hold.
local function held(task, number, ids, state, other)
  local records, mine, others = lookup('HMGET', key('task', task), ids), {}, {}
  local one, two = state .. ':' .. number .. ':', (other or state) .. ':' .. number .. ':'
  for i = 1, #ids do
    local record = records[i] or ''
    local is_mine = string.sub(record, 1, #one) == one or string.sub(record, 1, #two) == two
    local list = is_mine and mine or others
    list[#list + 1] = ids[i]
  end
  return mine, others
end

-- Forget the records of rows; the counters follow. Every row may have another state.
local function drop_records(task, ids)
  local records, states = lookup('HMGET', key('task', task), ids), {}
  for i = 1, #ids do
    if records[i] then
      local state = string.match(records[i], '^%a+')
      states[state] = (states[state] or 0) - 1
    end
  end
  call('HDEL', key('task', task), ids)
  for state, change in pairs(states) do
    count(state, task, change)
  end
end

-- The task may claim rows, whose records are gone, again.
local function give_back(task, ids)
  for name, index in pairs(indexes()) do
    if index.task == task then
      add_ready(name, index, claimable(index, ids, {}))
    end
  end
end

-- `change` more deliveries of each row.
local function count_deliveries(task, ids, change)
  local counts, changed = lookup('HMGET', key('deliveries', task), ids), {}
  for i = 1, #ids do
    changed[2 * i - 1], changed[2 * i] = ids[i], tonumber(counts[i] or 0) + change
  end
  set_rows(key('deliveries', task), changed)
end

-- Rows whose delivery ended without an acknowledgement: back, or aside after `limit` deliveries.
-- Those set aside are named in `set_aside`, so that somebody reports them.
local set_aside = {}
local function return_rows(task, number, claim, ids)
  drop_records(task, ids)
  local counts, again, aside = lookup('HMGET', key('deliveries', task), ids), {}, {}
  for i = 1, #ids do
    local delivered = not claim.waits and tonumber(counts[i] or 0)
    local list = delivered and delivered >= claim.limit and aside or again
    list[#list + 1] = ids[i]
  end
  give_back(task, again)
  record_all(task, aside, 'aside:' .. number .. ':' .. claim.consumer)
  count('aside', task, #aside)
  for _, id in ipairs(aside) do
    set_aside[#set_aside + 1] = tonumber(id)
  end
end

-- {ids (ranges), rows (still held), lease (ms), limit, consumer, draw, waits (a share of a draw that
-- its rank has not taken yet: no delivery), whole, by (the draw in the making that it is a piece of)},
-- or nil when it has ended.
local function claim_of(task, number)
  local text = redis.call('HGET', key('claims', task), number)
  return text and cjson.decode(text)
end

local function next_number()
  return string.format('%d', redis.call('HINCRBY', P, 'claims', 1))
end

local function save_claim(task, number, claim)
  redis.call('HSET', key('claims', task), number, cjson.encode(claim))
end

local function end_claim(task, number)
  redis.call('HDEL', key('claims', task), number)
  redis.call('ZREM', key('leases', task), number)
end

-- `rows` of the claim were dealt with.
local function shrink_claim(task, number, claim, rows)
  claim.rows = claim.rows - rows
  if claim.rows <= 0 then
    end_claim(task, number)
  else
    save_claim(task, number, claim)
  end
end

-- Let the leases of claims run out now: whoever asks next takes their rows back.
local function run_out(task, numbers)
  local entries, now = {}, lease_clock()
  for _, number in ipairs(numbers) do
    if redis.call('HEXISTS', key('claims', task), number) == 1 then
      entries[#entries + 1], entries[#entries + 2] = now, number
    end
  end
  call('ZADD', key('leases', task), entries)
end

-- {by (a name for who makes it), shares (draw -> claim numbers)} of a draw that is being made in
-- pieces, or nil.
local function begun_draw(task, whole)
  local text = redis.call('HGET', key('making', task), whole)
  return text and cjson.decode(text)
end

local function numbers_of(begun)
  local numbers = {}
  for _, theirs in pairs(begun.shares) do
    for _, number in ipairs(theirs) do
      numbers[#numbers + 1] = number
    end
  end
  return numbers
end

-- A draw in the making ends unmade.
local function abandon_draw(task, whole, begun)
  local numbers = numbers_of(begun)
  run_out(task, numbers)
  call('HDEL', key('drawn', task), numbers)
  redis.call('HDEL', key('making', task), whole)
  event('release', 'task', task)
end

-- {claims (numbers), by (who made it, if that was in pieces), waits (its rank has not asked for it
-- yet)}, or nil.
local function draw_of(task, name)
  local text = redis.call('HGET', key('draws', task), name)
  return text and cjson.decode(text)
end

-- A draw is forgotten with any of its claims, so that its ranks draw anew, all of them. What they
-- have not taken of it comes back.
local function forget_draw(task, number, claim)
  if not claim.draw then
    return
  end
  local begun = claim.whole and begun_draw(task, claim.whole)
  if begun and begun.by == claim.by then
    abandon_draw(task, claim.whole, begun)
  end
  redis.call('HDEL', key('drawn', task), number)
  local drawn, mine, waiting = draw_of(task, claim.draw), false, {}
  for _, other in ipairs(drawn and drawn.claims or {}) do
    mine = mine or other == number
    if not redis.call('ZSCORE', key('leases', task), other) then
      waiting[#waiting + 1] = other
    end
  end
  if mine then
    run_out(task, waiting)
    call('HDEL', key('drawn', task), drawn.claims)
    redis.call('HDEL', key('draws', task), claim.draw)
  end
end

-- A task's work on rows was lost: whoever consumed or holds them, they may be claimed again. Returns
-- those that can be, and those that cannot, since they were set aside. A delivery that did not end in
-- an acknowledgement stays counted.
local function work_again(task, ids)
  local records, open, again, by_claim = lookup('HMGET', key('task', task), ids), {}, {}, {}
  local aside = {}
  for i = 1, #ids do
    local state, number = string.match(records[i] or '', '^(%a+):(%d+)')
    if not state then
      open[#open + 1] = ids[i]
    elseif state == 'aside' then
      aside[#aside + 1] = ids[i]
    else
      by_claim[number] = by_claim[number] or { rows = {}, leased = 0 }
      local part = by_claim[number]
      part.rows[#part.rows + 1] = ids[i]
      part.leased = part.leased + (state == 'leased' and 1 or 0)
    end
  end
  for number, part in pairs(by_claim) do
    local claim = claim_of(task, number)
    -- A share that its rank has not taken yet is still to be worked on.
    local list = claim and claim.waits and again or open
    for _, id in ipairs(part.rows) do
      list[#list + 1] = id
    end
    if claim and list == open then
      forget_draw(task, number, claim)
      claim.draw = nil
      shrink_claim(task, number, claim, part.leased)
    end
  end
  drop_records(task, open)
  give_back(task, open)
  for _, id in ipairs(open) do
    again[#again + 1] = id
  end
  return again, aside
end

-- Take back the rows of claims whose lease has run out; true if there are more. A row is looked up in
-- three hashes besides those of its fields, and both dropped and entered again: two cells each.
local function expire_due(task)
  local most = math.floor(args.cells / (2 * (#args.fields + 3)))
  local due = redis.call('ZRANGEBYSCORE', key('leases', task), '-inf', lease_clock(),
    'LIMIT', 0, DUE_CLAIMS)
  local rows = 0
  for i, number in ipairs(due) do
    local claim = claim_of(task, number)
    rows = rows + claim.rows
    if i > 1 and rows > most then
      break
    end
    local mine = held(task, number, expand(claim.ids), 'leased')
    return_rows(task, number, claim, mine)
    end_claim(task, number)
    forget_draw(task, number, claim)
    event('expire', 'task', task, 'rows', #mine)
  end
  if #due == 0 then
    return false
  end
  touch() -- keys of indexes that were empty are made anew
  return redis.call('ZCOUNT', key('leases', task), '-inf', lease_clock()) > 0
end

-- Milliseconds until a lease of the task runs out; -1: there is none.
local function next_expiry(task)
  local first = redis.call('ZRANGE', key('leases', task), 0, 0, 'WITHSCORES')
  return first[2] and math.max(0, tonumber(first[2]) - lease_clock()) or -1
end

-- How many samples the task can still get, those included that others hold, and whether all of them
-- are made; nil: nobody said how many there will be.
local function prospect(task)
  local counts = redis.call('HMGET', P, 'samples', 'made', 'expected', 'ended',
    'consumed:' .. task, 'set_aside:' .. task)
  for i = 1, 6 do
    counts[i] = tonumber(counts[i] or nil)
  end
  local samples, made, expected, ended, consumed, aside = unpack(counts, 1, 6)
  local open = samples - (consumed or 0) - (aside or 0)
  if ended then
    return open, true
  elseif expected then
    local missing = math.max(0, expected - (made or 0))
    return open + missing, missing == 0
  end
end

-- An event of rows that a task has taken or done. Waiters need it only when it may be the last: what
-- is taken from the ready rows, and comes back, is no more than what was too little before.
local function taken_event(kind, task, rows)
  if prospect(task) then
    event(kind, 'task', task, 'rows', rows, 'news', '1')
  else
    event(kind, 'task', task, 'rows', rows)
  end
end

-- Rows that one call enters into an index. To look into a hash is a cell; to enter a row takes as long
-- as two, and six more where it is counted in its group.
local function rows_to_enter(index)
  local fields, taken = telling(index, {})
  local cells = 2 + #fields + (taken and 1 or 0) + (index.group_size > 0 and 6 or 0)
  return math.max(1, math.floor(args.cells / cells))
end

-- An index, made if it is new and built once, a bounded piece a call; false: call again.
local function built(name, task, fields, group_size)
  local known = indexes()
  local index = known[name] or { task = task, fields = fields, group_size = group_size, built = 0,
    done = false }
  if not index.done then
    local rows = rows_to_enter(index)
    local ids = redis.call('ZRANGEBYSCORE', key('samples'),
      string.format('(%d', index.built), '+inf', 'LIMIT', 0, rows)
    add_ready(name, index, claimable(index, ids, {}))
    index.built = tonumber(ids[#ids] or index.built)
    index.done = #ids < rows
    known[name] = index
    redis.call('HSET', key('indexes'), name, cjson.encode(index))
    touch()
  end
  return index.done
end

-- The index that a task asks for; false: call again.
local function prepared_index()
  return not expire_due(args.task)
    and built(args.index, args.task, args.fields, args.group_size)
end

-- Add to a reply what a consumer that has to wait needs to know.
local function standing(reply)
  local left, complete = prospect(args.task)
  reply.event, reply.left, reply.complete = last_event(), left or -1, complete or false
  reply.retry, reply.aside = next_expiry(args.task), set_aside
  reply.limit = limit_of(args.task)
  return cmsgpack.pack(reply)
end

-- Note once who is going to wait for what, for people who look; the client takes it out again.
local function note_waiter()
  if not args.waiter then
    return
  end
  local id, wait = unpack(args.waiter)
  if redis.call('HEXISTS', key('waiters'), id) == 0 then
    local now = milliseconds()
    redis.call('HSET', key('waiters'), id, cjson.encode({ task = args.task, since = now,
      ends = now + wait, consumer = args.consumer, count = args.count or 0,
      fields = table.concat(args.fields, '|') }))
    touch()
  end
end

-- It has what it waited for.
local function forget_waiter()
  if args.waiter then
    redis.call('HDEL', key('waiters'), args.waiter[1])
  end
end
