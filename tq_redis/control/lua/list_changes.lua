-- Which keys, or tags of theirs, have changed since a number. Read only.
-- ARGV     cells (how many one call may look at), generation and since (what an earlier answer
--          went up to)
-- Returns  code ok: generation (of the partition), upto (the number that this answer goes up to),
--          whole (it does not say all that has changed: list all keys), keys, ids (0 for one that
--          is gone), tags (as tags_of gives them), more (keys are left)
--          code no_partition
local generation, last, from = unpack(redis.call('HMGET', P, 'generation', 'changes', 'changes_from'))
if not generation then
  return cmsgpack.pack({ code = 'no_partition' })
end
if args.generation ~= generation or args.since < tonumber(from or 0) then
  return cmsgpack.pack({ code = 'ok', generation = generation, upto = tonumber(last or 0), whole = true })
end
local most = math.max(1, math.floor(args.cells / (3 + redis.call('SCARD', key('tagnames')))))
local entries = redis.call('ZRANGEBYSCORE', key('changes'), string.format('(%d', args.since), '+inf',
  'WITHSCORES', 'LIMIT', 0, most)
local keys = {}
for i = 1, #entries, 2 do
  keys[#keys + 1] = entries[i]
end
local ids, numbers = lookup('HMGET', key('keys'), keys), {}
for i = 1, #keys do
  ids[i] = ids[i] or '0'
  numbers[i] = tonumber(ids[i])
end
return cmsgpack.pack({
  code = 'ok',
  generation = generation,
  upto = #keys == 0 and args.since or tonumber(entries[#entries]),
  keys = keys,
  ids = numbers,
  tags = tags_of(ids),
  more = #keys == most,
})
