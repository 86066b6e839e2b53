-- Let a task claim rows again that it has consumed, holds or has set aside; page by page.
-- ARGV     request, request_ttl, idle_ttl, task, after (sample id; 0 on the first page), rows (of a
--          page), upto (the last claim that is undone; later ones were made behind the reset)
-- Returns  code ok: after (for the next page), upto, done, rows (that were given back)
--          code no_partition
local replayed = replay()
if replayed then
  return replayed
end
even_when_full()
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition' })
end
local task, upto = args.task, args.upto
if args.after == 0 then
  upto = tonumber(redis.call('HGET', P, 'claims') or 0)
  redis.call('UNLINK', key('claims', task), key('leases', task), key('deliveries', task),
    key('draws', task), key('drawn', task), key('making', task))
end
local page = redis.call('ZRANGEBYSCORE', key('samples'), string.format('(%d', args.after), '+inf',
  'LIMIT', 0, args.rows)
local records, again = lookup('HMGET', key('task', task), page), {}
for i = 1, #page do
  if records[i] and tonumber(string.match(records[i], '^%a+:(%d+)')) <= upto then
    again[#again + 1] = page[i]
  end
end
drop_records(task, again)
give_back(task, again)
if #again > 0 then
  event('reset', 'task', task, 'rows', #again)
end
touch()
return finish({ code = 'ok', after = tonumber(page[#page] or args.after), upto = upto,
  done = #page < args.rows, rows = #again })
