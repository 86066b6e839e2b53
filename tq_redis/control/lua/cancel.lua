-- Undo a claim that nobody reads the reply of, whether it has run, will run, or never arrives.
-- ARGV     request (of the claim), request_ttl, idle_ttl, task,
--          claim (number), ids (ranges): what the claim answered, where the caller knows it; else
--          they are read in the reply that Redis keeps for a while
--          whole, by: of a draw that was being made in pieces, of which this is one: all come back,
--          unless the draw is published
-- Returns  code ok: rows (given back)
local waiting = frozen()
if waiting then
  return waiting
end
local reply = redis.call('GET', key('req', args.request))
reply = reply and cmsgpack.unpack(reply)
even_when_full()
-- A claim that arrives behind this one finds this as its reply, and does nothing.
finish({ code = 'cancelled' })
local task, number, ids = args.task, args.claim, nil
if args.whole then
  local begun = begun_draw(task, args.whole)
  if begun and begun.by == args.by then
    abandon_draw(task, args.whole, begun)
  end
  return cmsgpack.pack({ code = 'ok', rows = 0 })
elseif number then
  ids = expand(args.ids)
elseif reply and reply.code == 'ok' then
  number, ids = reply.claim, {}
  for i, id in ipairs(reply.ids) do
    ids[i] = string.format('%d', id)
  end
else
  return cmsgpack.pack({ code = 'ok', rows = 0 })
end
number = string.format('%d', number)
local mine = held(task, number, ids, 'leased', 'consumed')
if #mine == 0 then
  return cmsgpack.pack({ code = 'ok', rows = 0 })
end
local claim = claim_of(task, number)
drop_records(task, mine)
if claim then
  count_deliveries(task, mine, -1)
  forget_draw(task, number, claim)
  end_claim(task, number)
end
give_back(task, mine)
event('release', 'task', task, 'rows', #mine)
touch()
return cmsgpack.pack({ code = 'ok', rows = #mine })
