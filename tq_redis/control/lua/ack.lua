-- The consumer has done its work on rows that it holds with a lease: they are consumed.
-- ARGV     request, request_ttl, idle_ttl, task, claim (number), ids (ranges)
-- Returns  code ok: ids (rows that the claim no longer holds, and did not consume; those that were
--          cleared meanwhile are passed over)
local replayed = replay()
if replayed then
  return replayed
end
even_when_full()
local task, number = args.task, string.format('%d', args.claim)
local mine, others = held(task, number, expand(args.ids), 'leased')
local claim = #mine > 0 and claim_of(task, number)
if not claim then
  -- A reset is on its way to these rows: their claim has ended already.
  others, mine = expand(args.ids), {}
else
  record_all(task, mine, 'consumed:' .. number .. ':' .. claim.consumer)
  count('leased', task, -#mine)
  count('consumed', task, #mine)
  call('HDEL', key('deliveries', task), mine)
  shrink_claim(task, number, claim, #mine)
  taken_event('ack', task, #mine)
  touch()
end
local _, lost = held(task, number, known_and_unknown(others), 'consumed')
for i = 1, #lost do
  lost[i] = tonumber(lost[i])
end
return finish({ code = 'ok', ids = lost })
