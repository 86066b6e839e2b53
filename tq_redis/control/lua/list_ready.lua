-- What a task could claim, page by page, for a sampler to choose from.
-- ARGV     request, request_ttl, idle_ttl, task, fields, index, group_size (0), cells (see claim),
--          after (the last id of the page before), rows (of a page), draw, whole,
--          consumer, count, waiter (see claim), optional draws (names that are drawn together)
-- Returns  code ok: ids, group_of ('=<group>', '' where a row has none), tags, more
--          code drawn: the draw was made already; recall gives it
--          code short: it is being made
--          and missing (those of `draws` that were not made), event, left, complete, retry, aside as
--          for claim
--          code again | no_partition: event
even_when_full()
local waiting = frozen()
if waiting then
  return waiting
end
if not partition_exists() then
  return cmsgpack.pack({ code = 'no_partition', event = last_event() })
end
if not prepared_index() then
  return cmsgpack.pack({ code = 'again', aside = set_aside })
end
local draws, missing = key('draws', args.task), {}
if args.draw and redis.call('HEXISTS', draws, args.draw) == 1 then
  return cmsgpack.pack({ code = 'drawn', aside = set_aside })
end
note_waiter()
if args.whole and begun_draw(args.task, args.whole) then
  return standing({ code = 'short' })
end
for _, name in ipairs(args.draws or {}) do
  missing[#missing + 1] = redis.call('HEXISTS', draws, name) == 0 and name or nil
end
local ready = key('ready', args.index)
local ids = redis.call('ZRANGEBYSCORE', ready, string.format('(%d', args.after), '+inf',
  'LIMIT', 0, args.rows)
local numbers, groups = {}, lookup('HMGET', key('group'), ids)
for i = 1, #ids do
  numbers[i], groups[i] = tonumber(ids[i]), groups[i] and '=' .. groups[i] or ''
end
return standing({ code = 'ok', ids = numbers, group_of = groups, tags = tags_of(ids),
  missing = missing, more = #ids == args.rows })
