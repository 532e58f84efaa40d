-- Stop counting a user. `OwnershipDirectory.remove_chain_user`.
-- KEYS: fleet epochs readers
-- ARGV: epoch, user, msgpack [chunk, ...]
-- Returns: [1 if the chunk has no user any more, else 0, ...]. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs chain_users

local epoch, user = tonumber(ARGV[1]), ARGV[2]
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

local unused = {}
for index, chunk in ipairs(cmsgpack.unpack(ARGV[3])) do
  local found = users_of(chunk)
  local position = position_of(found, epoch, user)
  if position then
    table.remove(found, position)
    table.remove(found, position)
  end
  found = live_users(found, now_s)
  keep_users(chunk, found)
  unused[index] = #found == 0 and 1 or 0
end
return unused
