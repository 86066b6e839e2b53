-- Let a claim's lease run from now on again. Not stored for a replay: it may as well run twice.
-- ARGV     idle_ttl, task, claim (number), lease (milliseconds; 0: as long as it was given),
--          ids (ranges): samples of the claim, or none
-- Returns  code ok: lease (milliseconds) | lost: the claim has ended, or holds none of `ids`
local number = string.format('%d', args.claim)
local claim, ids = claim_of(args.task, number), expand(args.ids)
if not claim or (#ids > 0 and #held(args.task, number, ids, 'leased') == 0) then
  return cmsgpack.pack({ code = 'lost' })
end
local lease = args.lease > 0 and args.lease or claim.lease
local before = redis.call('ZSCORE', key('leases', args.task), number)
if before then
  local ends = lease_clock() + lease
  -- Removed first: this passes when Redis's memory is full.
  redis.call('ZREM', key('leases', args.task), number)
  redis.call('ZADD', key('leases', args.task), ends, number)
  if ends < tonumber(before) then
    event('renew', 'task', args.task) -- waiters must not sleep for longer
  end
  touch()
end
return cmsgpack.pack({ code = 'ok', lease = lease })
