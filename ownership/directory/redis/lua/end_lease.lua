-- End the epoch now. `OwnershipDirectory.end_lease`.
-- KEYS: fleet epochs
-- ARGV: epoch
-- Returns: nothing.
-- USES: clock epochs

local epoch = tonumber(ARGV[1])
local now_s = tick_s()
local entry = entry_of(epoch)
if entry then
  entry[DEADLINE_S] = math.min(entry[DEADLINE_S], now_s)
  keep_entry(epoch, entry)
end
return false
