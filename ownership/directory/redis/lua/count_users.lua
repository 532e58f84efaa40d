-- Return the number of users of each chunk. `OwnershipDirectory.count_users`.
-- KEYS: fleet epochs readers
-- ARGV: msgpack [chunk, ...]
-- Returns: [number of users, ...].
-- USES: clock epochs chain_users

local now_s = tick_s()
local counts = {}
for index, chunk in ipairs(cmsgpack.unpack(ARGV[1])) do
  counts[index] = #live_users(users_of(chunk), now_s) / 2
end
return counts
