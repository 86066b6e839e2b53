-- Put a new owner in place of the one that the caller saw, if it is still that one.
-- ARGV     seen (the record that the caller saw; empty: none), owner (the record to write; empty:
--          none), lifetime (seconds)
-- Returns  code ok, also when `owner` is there already, so that the call can be repeated
--          code held: owner (the record that is there)
local held = redis.call('GET', P) or ''
if held ~= args.seen and held ~= args.owner then
  return cmsgpack.pack({ code = 'held', owner = held })
end
if args.owner == '' then
  redis.call('DEL', P)
elseif held == args.owner then
  -- Not written again: this passes when Redis's memory is full.
  redis.call('EXPIRE', P, args.lifetime)
else
  redis.call('SET', P, args.owner, 'EX', args.lifetime)
end
return cmsgpack.pack({ code = 'ok' })
