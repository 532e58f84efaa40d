-- The epoch lives for another lease from now. `OwnershipDirectory.renew_lease`.
-- KEYS: fleet epochs
-- ARGV: epoch
-- Returns: nothing. Errors: STALE_EPOCH.
-- USES: clock epochs

local epoch = tonumber(ARGV[1])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end
local entry = entry_of(epoch)
entry[DEADLINE_S] = now_s + entry[LEASE_S]
keep_entry(epoch, entry)
return false
