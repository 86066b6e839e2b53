-- Give a task's consumer samples that have all the fields it reads: for good (they are consumed), or
-- with a lease.
-- ARGV     request, request_ttl, idle_ttl, task, fields, consumer,
--          index (name of the ready index of this task, group size and fields), cells (that one call
--          may look at to complete the index, or to take back leases),
--          lease (milliseconds; 0: none), limit (deliveries after which a row is set aside)
--          either ids (rows that a sampler chose: these or none; none for a draw that was made)
--          or count, need (samples that must be there for it), group_size (0: single samples)
--          optional waiter {id, milliseconds that it will wait for samples}
--          optional draw: a name under which the claim is remembered; whoever asks for that name
--          again gets the same rows
--          optional whole (with draw): what the draws are called that are made together
--          optional shares ({draw, ids (ranges)}, ...): parts of `ids` that other draws will get
--          optional making {by (a name for who makes it), first, last, hold (milliseconds)}: this is a
--          piece of a draw that is too large for one call; all are held until the last one is there,
--          which publishes the draw (see recall), and come back if that does not happen
-- Returns  code ok: claim (its number), ids (ascending, or group by group), schema (JSON per field),
--          tags (as tags_of gives them), aside (rows set aside meanwhile); of these a
--          piece has aside alone
--          code short: ready (samples that could be claimed), groups, event (wait after this one),
--          left (samples that can still come; -1: not known), complete (all of them are made),
--          retry (milliseconds until a lease runs out; -1: there is none), aside
--          code taken (ids): of the rows chosen, those that another consumer has got
--          code again: call again, there was too much to do for one call
--          code drawn: the draw was made in pieces already; recall gives it
--          code lost: the draw's pieces have come back
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

local making, begun = args.making, nil

local function answer(number, ids)
  local numbers = {}
  for i = 1, #ids do
    numbers[i] = tonumber(ids[i])
  end
  forget_waiter()
  touch()
  return finish({ code = 'ok', claim = tonumber(number), ids = numbers, tags = tags_of(ids),
    schema = lookup('HMGET', key('schema'), args.fields), aside = set_aside })
end

-- Too few rows for a piece: those before it go back too.
local function give_up()
  if making and not making.first then
    abandon_draw(task, args.whole, begun)
  end
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

if not prepared_index() then
  return cmsgpack.pack({ code = 'again', aside = set_aside })
end

-- 1. Was it drawn before, or is somebody about to?
if making and not making.first then
  begun = begun_draw(task, args.whole)
  if not begun or begun.by ~= making.by then
    return cmsgpack.pack({ code = 'lost', aside = set_aside })
  end
elseif args.draw then
  local drawn, number, ids = recall_draw(task, args.draw, 1)
  if drawn and (making or #drawn.claims > 1) then
    return cmsgpack.pack({ code = 'drawn', aside = set_aside })
  elseif drawn then
    local refusal = unfit(ids)
    if refusal then
      return refusal
    end
    take_share(task, args.draw, drawn, number, ids)
    return answer(number, ids)
  elseif begun_draw(task, args.whole) then
    note_waiter()
    return standing({ code = 'short', ready = 0, groups = 0 })
  end
  begun = making and { by = making.by, shares = {} }
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
  if #taken > 0 or (#ids == 0 and not making) then
    give_up()
    return refuse('taken', taken, { aside = set_aside })
  end
  call('ZREM', ready, ids)
else
  local waiting = redis.call('ZCARD', ready)
  local groups = size > 0 and tonumber(redis.call('HGET', key('ready', name, 'count'), ':whole')) or 0
  if (size == 0 and waiting or groups * size) < args.need then
    give_up()
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

-- 3. Record it: as a piece, or with the shares of others held until their ranks ask for them.
if making then
  for _, share in ipairs(args.shares or { { args.draw, to_ranges(ids) } }) do
    local name, numbers = share[1], begun.shares[share[1]] or {}
    numbers[#numbers + 1] = hold_share(task, name, expand(share[2]), making)
    begun.shares[name] = numbers
  end
  taken_event('claim', task, #ids)
  if making.last then
    publish_draws(task, args.whole, begun)
    forget_waiter()
  else
    set_leases(task, numbers_of(begun), making.hold)
    redis.call('HSET', key('making', task), args.whole, cjson.encode(begun))
  end
  touch()
  return finish({ code = 'ok', aside = set_aside })
end
local own, number = ids, next_number()
for _, share in ipairs(args.shares or {}) do
  local draw, rows = share[1], expand(share[2])
  if draw == args.draw then
    own = rows
  else
    local numbers = { hold_share(task, draw, rows) }
    save_draw(task, draw, { claims = numbers, waits = true })
    set_leases(task, numbers, args.lease)
  end
end
if args.draw then
  redis.call('HSET', key('drawn', task), number, cjson.encode(to_ranges(own)))
  save_draw(task, args.draw, { claims = { number } })
end
local state = leased and 'leased' or 'consumed'
record_all(task, own, state .. ':' .. number .. ':' .. args.consumer)
count(state, task, #own)
if leased then
  save_claim(task, number, { ids = to_ranges(own), rows = #own, lease = args.lease,
    limit = args.limit, consumer = args.consumer, draw = args.draw })
  set_leases(task, { number }, args.lease)
  count_deliveries(task, own, 1)
end
taken_event('claim', task, #own)
return answer(number, own)
