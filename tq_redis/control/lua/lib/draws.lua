-- Draws: batches that are remembered under names, and given again to whoever asks for them.
-- A draw has parts, each with a claim: one, or several of a large batch, which no call handles at once.

-- A draw that was made (see draw_of), with claim number and ids of one part (from 1). It is forgotten,
-- and nil, if bytes were lost since and its task is to work on some of these rows again.
local function recall_draw(task, name, part)
  local drawn = draw_of(task, name)
  local number = drawn and drawn.claims[part]
  if not number then
    return nil
  end
  local ids = expand(cjson.decode(redis.call('HGET', key('drawn', task), number)))
  if redis.call('HEXISTS', P, 'lost') == 1 then
    local _, again = held(task, number, known_and_unknown(ids), 'leased', 'consumed')
    if #again > 0 then
      forget_draw(task, number, { draw = name })
      touch()
      return nil
    end
  end
  return drawn, number, ids
end

-- The refusal of rows that were cleared, or lack a field that this call asks for; else nil.
local function unfit(ids)
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
end

-- From now on, the leases of shares that wait for their ranks run as the call has them; without
-- one they wait for as long as it takes.
local function set_leases(task, numbers, milliseconds_left)
  if milliseconds_left == 0 then
    call('ZREM', key('leases', task), numbers)
    return
  end
  local entries, ends = {}, lease_clock() + milliseconds_left
  for i = 1, #numbers do
    entries[2 * i - 1], entries[2 * i] = ends, numbers[i]
  end
  call('ZADD', key('leases', task), entries)
end

local function save_draw(task, name, drawn)
  redis.call('HSET', key('draws', task), name, cjson.encode(drawn))
end

-- Hold rows for the rank that the draw `name` is for. Returns the number of the claim.
local function hold_share(task, name, ids, making)
  local number = next_number()
  save_claim(task, number, { ids = to_ranges(ids), rows = #ids, lease = args.lease,
    limit = args.limit, consumer = args.consumer, draw = name, waits = true,
    whole = making and args.whole, by = making and making.by })
  redis.call('HSET', key('drawn', task), number, cjson.encode(to_ranges(ids)))
  record_all(task, ids, 'leased:' .. number .. ':' .. args.consumer)
  count('leased', task, #ids)
  return number
end

-- A rank takes a part of its draw, for a time or for good. With the first part it keeps the others
-- for as long, so that it gets all of them.
local function take_share(task, name, drawn, number, ids)
  local claim = claim_of(task, number)
  if not claim or not claim.waits then
    return
  end
  if drawn.waits then
    drawn.waits = nil
    save_draw(task, name, drawn)
    set_leases(task, drawn.claims, args.lease)
  end
  local mine = held(task, number, ids, 'leased')
  if args.lease > 0 then
    claim.waits, claim.lease, claim.limit = nil, args.lease, args.limit
    save_claim(task, number, claim)
    set_leases(task, { number }, args.lease)
    count_deliveries(task, mine, 1)
  else
    count('leased', task, -#mine)
    count('consumed', task, #mine)
    record_all(task, mine, 'consumed:' .. number .. ':' .. args.consumer)
    end_claim(task, number)
  end
  taken_event('claim', task, #mine)
end

-- All pieces are there: whoever asks for one of the draws gets it. A rank that has got another one
-- meanwhile keeps that.
local function publish_draws(task, whole, begun)
  for name, numbers in pairs(begun.shares) do
    if redis.call('HEXISTS', key('draws', task), name) == 1 then
      run_out(task, numbers)
      call('HDEL', key('drawn', task), numbers)
    else
      save_draw(task, name, { claims = numbers, by = begun.by, waits = true })
      set_leases(task, numbers, args.lease)
    end
  end
  redis.call('HDEL', key('making', task), whole)
  event('draw', 'task', task)
end
