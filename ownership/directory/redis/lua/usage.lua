-- Return the users of each chunk, and the time since one came or left. `OwnershipDirectory.usage`.
-- KEYS: fleet epochs readers used
-- ARGV: msgpack [chunk, ...]
-- Returns: [number of users, idle seconds as text or empty, ...].
-- USES: clock epochs chain_users

local now_s = tick_s()
local answers = {}
for index, chunk in ipairs(cmsgpack.unpack(ARGV[1])) do
  local used_s = redis.call('ZSCORE', used, chunk)
  answers[2 * index - 1] = #live_users(users_of(chunk), now_s) / 2
  answers[2 * index] = used_s and exact(now_s - tonumber(used_s)) or ''
end
return answers
