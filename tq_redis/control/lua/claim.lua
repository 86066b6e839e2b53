-- Give a task's consumer samples that have all the fields it reads: for good (they are consumed), or
-- with a lease.
-- ARGV     request, request_ttl, idle_ttl, task, fields, consumer,
--          index (name of the ready index of this task, group size and fields), build (rows that one
--          call may add to an index that is not complete yet, or take back from leases),
--          lease (milliseconds; 0: none), limit (deliveries after which a row is set aside)
--          either ids (rows that a sampler chose: these or none; none for a draw that was made)
--          or count, need (samples that must be there for it), group_size (0: single samples)
--          optional waiter {id, milliseconds that it will wait for samples}
--          optional draw: a name under which the claim is remembered; whoever asks for that name
--          again gets the same rows
--          optional shares ({draw, ids (ranges)}, ...): parts of `ids` that other draws will get
-- Returns  code ok: claim (its number), ids (ascending, or group by group), schema (JSON per field),
--          tags ({name, JSON or '' per row}, ...), aside (rows set aside meanwhile)
--          code short: ready (samples that could be claimed), groups, event (wait after this one),
--          left (samples that can still come; -1: not known), complete (all of them are made),
--          retry (milliseconds until a lease runs out; -1: there is none), aside
--          code taken (ids): of the rows chosen, those that another consumer has got
--          code again: call again, there was too much to do for one call
--          code no_partition: event; code unknown (ids): rows of the draw were cleared
--          code not_ready (field, ids): rows of the draw lack a field
local replayed = replay()
if replayed then
  return replayed
end
even_when_full()
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition', event = last_event() })
end
local task, leased = args.task, args.lease > 0

local function answer(number, ids)
  local numbers = {}
  for i = 1, #ids do
    numbers[i] = tonumber(ids[i])
  end
  touch()
  return finish({ code = 'ok', claim = tonumber(number), ids = numbers, tags = tags_of(ids),
    schema = lookup('HMGET', key('schema'), args.fields), aside = set_aside })
end

-- The claim's time runs from now on: its rows are delivered.
local function deliver(number, ids)
  redis.call('ZADD', key('leases', task), lease_clock() + args.lease, number)
  count_deliveries(task, ids, 1)
end

local function remember(draw, number, ids)
  redis.call('HSET', key('draws', task), draw,
    cjson.encode({ claim = tonumber(number), ids = to_ranges(ids) }))
end

-- The rows of those shares whose draw was not made, or was forgotten since its lease ran out. A rank
-- that has its share, or will find it, gets no second one.
local function open_shares()
  local shares, rows = {}, {}
  for _, share in ipairs(args.shares) do
    if redis.call('HEXISTS', key('draws', task), share[1]) == 0 then
      shares[#shares + 1] = share
      for _, id in ipairs(expand(share[2])) do
        rows[#rows + 1] = id
      end
    end
  end
  args.shares = shares
  return rows
end

local function next_number()
  return string.format('%d', redis.call('HINCRBY', P, 'claims', 1))
end

local function keep_claim(number, ids, draw)
  save_claim(task, number, { ids = to_ranges(ids), rows = #ids, lease = args.lease,
    limit = args.limit, consumer = args.consumer, draw = draw })
end

if not prepared_index() then
  return cmsgpack.pack({ code = 'again', aside = set_aside })
end

-- 1. Was it drawn before?
local drawn = args.draw and recall_draw(task, args.draw)
if drawn then
  local number, ids = string.format('%d', drawn.claim), expand(drawn.ids)
  local _, missing = known_and_unknown(ids)
  if #missing > 0 then
    return refuse('unknown', missing)
  end
  for _, field in ipairs(args.fields) do -- whoever drew may have asked for others
    local cells, lacking = lookup('HMGET', key('field', field), ids), {}
    for i = 1, #ids do
      lacking[#lacking + 1] = not cells[i] and ids[i] or nil
    end
    if #lacking > 0 then
      return refuse('not_ready', lacking, { field = field })
    end
  end
  local claim = claim_of(task, number)
  if claim and not redis.call('ZSCORE', key('leases', task), number) then
    -- A share whose rank asks for the first time.
    if leased then
      claim.lease, claim.limit = args.lease, args.limit
      save_claim(task, number, claim)
      deliver(number, ids)
    else
      count('leased', task, -#ids)
      count('consumed', task, #ids)
      record_all(task, ids, 'consumed:' .. number .. ':' .. args.consumer)
      end_claim(task, number)
    end
    taken_event('claim', task, #ids)
  end
  return answer(number, ids)
end

-- 2. Choose: what a sampler chose, or the lowest ids, or the groups with the lowest ready ids.
local name, size = args.index, args.group_size
local ready = key('ready', name)
local ids = {}
if args.ids then
  ids = args.shares and open_shares() or expand(args.ids)
  local scores, taken = lookup('ZMSCORE', ready, ids), {}
  for i = 1, #ids do
    if not scores[i] then
      taken[#taken + 1] = ids[i]
    end
  end
  if #taken > 0 or #ids == 0 then
    return refuse('taken', taken, { aside = set_aside })
  end
  call('ZREM', ready, ids)
else
  local waiting = redis.call('ZCARD', ready)
  local groups = size > 0 and tonumber(redis.call('HGET', key('ready', name, 'count'), ':whole')) or 0
  if (size == 0 and waiting or groups * size) < args.need then
    note_waiter()
    return standing({ code = 'short', ready = waiting, groups = groups })
  end
  if size == 0 then
    local popped = redis.call('ZPOPMIN', ready, args.count)
    for i = 1, #popped, 2 do
      ids[#ids + 1] = popped[i]
    end
  end
  -- A group of more samples than a claim takes gives several, one a round.
  while #ids < args.count do
    local wanted = (args.count - #ids) / size
    local taken, changes = {}, {}
    for _, group in ipairs(redis.call('ZRANGE', key('ready', name, 'groups'), 0, wanted - 1)) do
      for _, member in ipairs(first_of(name, group, size)) do
        taken[#taken + 1], ids[#ids + 1] = member, id_of(member)
      end
      changes[group] = -size
    end
    call('ZREM', ready, taken)
    recount(name, size, changes)
  end
end
for other, definition in pairs(indexes()) do
  if other ~= name and definition.task == task then
    drop_ready(other, definition, ids)
  end
end

-- 3. Record it. Shares of others are held without a lease until their ranks ask for them.
local own, number = ids, next_number()
if args.draw and not args.shares then
  remember(args.draw, number, own)
end
for _, share in ipairs(args.shares or {}) do
  local draw, rows = share[1], expand(share[2])
  if draw == args.draw then
    own = rows
    remember(draw, number, rows)
  else
    local theirs = next_number()
    remember(draw, theirs, rows)
    keep_claim(theirs, rows, draw)
    record_all(task, rows, 'leased:' .. theirs .. ':' .. args.consumer)
    count('leased', task, #rows)
  end
end
local state = leased and 'leased' or 'consumed'
record_all(task, own, state .. ':' .. number .. ':' .. args.consumer)
count(state, task, #own)
if leased then
  keep_claim(number, own, args.draw)
  deliver(number, own)
end
taken_event('claim', task, #own)
return answer(number, own)
