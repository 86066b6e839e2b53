-- Write a part of a partition that is being loaded, beside the one that is there. May be repeated.
-- ARGV     token (of the load), suffix, type, items (as snapshot gives them), lifetime (seconds, of
--          the key), number (of this page, from 1 on), handles (of blocks that are named in the items)
-- Returns  code ok
--          code lost: pages before this one are not here, nothing was done
local pages = key('load', args.token)
local before = tonumber(redis.call('GET', pages) or 0)
if before ~= args.number - 1 and before ~= args.number then
  return cmsgpack.pack({ code = 'lost' })
end
redis.call('SET', pages, args.number, 'EX', args.lifetime)
local name, items = key('load', args.token, args.suffix), args.items
if args.type == 'zset' then
  local entries = {}
  for i = 1, #items, 2 do
    entries[i], entries[i + 1] = items[i + 1], items[i]
  end
  call('ZADD', name, entries)
elseif args.type == 'hash' then
  set_rows(name, items)
else
  call('SADD', name, items)
end
redis.call('EXPIRE', name, args.lifetime)
if #args.handles > 0 then
  call('SADD', key('loading'), args.handles)
  redis.call('EXPIRE', key('loading'), args.lifetime)
end
return cmsgpack.pack({ code = 'ok' })
