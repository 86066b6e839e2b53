-- Give a task's consumer a draw that was made: what one part of it has, then that part itself, for good
-- or with a lease. Not stored for a replay: it may as well run twice.
-- ARGV     idle_ttl, task, draw, whole, fields, consumer, lease, limit, waiter, count (see claim),
--          cells (that one call may look at to take back leases), part (from 1), by (who made the
--          draw, as an earlier reply names it; '': any), take (true: the part itself)
-- Returns  code ok: claim (its number), ids, schema, tags (see claim), parts (of the draw), by, waits
--          (the part is to be taken), aside (rows set aside meanwhile); when taken, aside alone
--          code none: it was not made, or is forgotten
--          code short: it is being made; and event, left, complete, retry (see claim)
--          code again | no_partition: event
--          code unknown (ids) | not_ready (field, ids): see claim
even_when_full()
local waiting = frozen()
if waiting then
  return waiting
end
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition', event = last_event() })
end
local task, name = args.task, args.draw
if expire_due(task) then
  return cmsgpack.pack({ code = 'again', aside = set_aside })
end
local drawn, number, ids = recall_draw(task, name, args.part)
if not drawn and begun_draw(task, args.whole) then
  note_waiter()
  return standing({ code = 'short' })
end
if not drawn or (args.by ~= '' and args.by ~= drawn.by) then
  return cmsgpack.pack({ code = 'none', aside = set_aside })
end
if args.take then
  take_share(task, name, drawn, number, ids)
  touch()
  return cmsgpack.pack({ code = 'ok', aside = set_aside })
end
local refusal = unfit(ids)
if refusal then
  return refusal
end
forget_waiter()
local claim, numbers = claim_of(task, number), {}
for i = 1, #ids do
  numbers[i] = tonumber(ids[i])
end
return cmsgpack.pack({ code = 'ok', claim = tonumber(number), ids = numbers, tags = tags_of(ids),
  schema = lookup('HMGET', key('schema'), args.fields), parts = #drawn.claims,
  by = drawn.by or '', waits = claim and claim.waits or false, aside = set_aside })
