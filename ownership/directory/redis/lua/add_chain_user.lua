-- Count a session or request as using chains up to these chunks. `OwnershipDirectory.add_chain_user`.
-- KEYS: fleet epochs readers used
-- ARGV: epoch, user, most users of a chunk, most chunks remembered, msgpack [chunk, ...]
-- Returns: nothing. Errors: STALE_EPOCH.
-- USES: clock epochs chain_users

local epoch, user = tonumber(ARGV[1]), ARGV[2]
local max_users, max_used = tonumber(ARGV[3]), tonumber(ARGV[4])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

for _, chunk in ipairs(cmsgpack.unpack(ARGV[5])) do
  local found = users_of(chunk)
  if #found / 2 < max_users and not position_of(found, epoch, user) then
    table.insert(found, epoch)
    table.insert(found, user)
    keep_users(chunk, found)
  end
  redis.call('ZADD', used, exact(now_s), chunk)
end
local too_many = redis.call('ZCARD', used) - max_used
if too_many > 0 then
  redis.call('ZREMRANGEBYRANK', used, 0, too_many - 1)
end
return false
