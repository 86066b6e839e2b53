-- Give rows back that a claim holds with a lease; rows that it does not hold are passed over.
-- ARGV     request, request_ttl, idle_ttl, task, claim (number), ids (ranges)
-- Returns  code ok: aside (rows that were delivered too often and are set aside)
local replayed = replay()
if replayed then
  return replayed
end
even_when_full()
local task, number = args.task, string.format('%d', args.claim)
local mine = held(task, number, expand(args.ids), 'leased')
local claim = #mine > 0 and claim_of(task, number)
if claim then -- else a reset is on its way to these rows
  return_rows(task, number, claim, mine)
  forget_draw(task, number, claim)
  claim.draw = nil
  shrink_claim(task, number, claim, #mine)
  event('release', 'task', task, 'rows', #mine)
  touch()
end
return finish({ code = 'ok', aside = set_aside })
