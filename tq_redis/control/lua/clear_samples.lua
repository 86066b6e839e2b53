-- Forget rows: their cells, keys, tags, groups and consumption. Unknown rows are passed over, so
-- that a clear can be repeated.
-- ARGV     request, request_ttl, idle_ttl, ids (ranges, distinct), cells (how many one call may
--          drop: where rows have many, it clears the first few rows only)
-- Returns  code ok: freed (handles to free), cleared (rows that were there), done (how many of the
--          rows named were dealt with)
local replayed = replay()
if replayed then
  return replayed
end
local asked = expand(args.ids)
if not partition_exists() then
  return cmsgpack.pack({ code = 'ok', freed = {}, cleared = 0, done = #asked })
end
head(asked, rows_to_forget(args.cells))
local removed = forget_rows(known_and_unknown(asked))
event('clear', 'rows', removed)
touch()
return finish({ code = 'ok', freed = to_free(), cleared = removed, done = #asked })
