-- Read a partition as it stands, key by key and page by page, for a checkpoint. Read only.
-- ARGV     nothing: which keys are there? Else suffix, type (of one of them), cursor, count (of
--          entries that one call looks at, about)
-- Returns  code ok: keys ({suffix, type}, ...) without what a load makes anew: ready indexes, leases,
--          waiters, events, changes, freed blocks, room for puts; or cursor ('0' at the key's end),
--          items (of a hash name, value, ...; of a sorted set member, score, ...; of a set members;
--          some may come twice)
--          code no_partition
local COMMANDS = { hash = 'HSCAN', zset = 'ZSCAN', set = 'SSCAN' }
local MADE_ANEW = { admitted = true, changes = true, freed = true, frozen = true, leases = true,
  ready = true, waiters = true }
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
if args.suffix then
  local name = args.suffix == '' and P or key(args.suffix)
  local page = redis.call(COMMANDS[args.type], name, args.cursor, 'COUNT', args.count)
  return cmsgpack.pack({ code = 'ok', cursor = page[1], items = page[2] })
end
local keys, seen = {}, {}
for _, name in ipairs(partition_keys()) do
  local suffix, kind = string.sub(name, #P + 2), redis.call('TYPE', name).ok
  if COMMANDS[kind] and not seen[name] and not MADE_ANEW[string.match(suffix, '^[^:]*')] then
    seen[name] = true
    keys[#keys + 1] = { suffix, kind }
  end
end
return cmsgpack.pack({ code = 'ok', keys = keys })
