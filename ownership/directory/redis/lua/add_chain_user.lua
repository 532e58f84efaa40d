-- Count a session or request as using chains up to these chunks. `OwnershipDirectory.add_chain_user`.
-- KEYS: fleet epochs readers
-- ARGV: epoch, user, most users of a chunk, msgpack [chunk, ...]
-- Returns: nothing. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs chain_users

local epoch, user, max_users = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

for _, chunk in ipairs(cmsgpack.unpack(ARGV[4])) do
  local found = users_of(chunk)
  if #found / 2 < max_users and not position_of(found, epoch, user) then
    table.insert(found, epoch)
    table.insert(found, user)
    keep_users(chunk, found)
  end
end
return false
