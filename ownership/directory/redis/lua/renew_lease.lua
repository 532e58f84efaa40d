-- Extend the lease from now. `OwnershipDirectory.renew_lease`.
-- KEYS: fleet epochs names peers chunks runs
-- ARGV: epoch
-- Returns: memory_name() of memory.lua. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs memory

local epoch = tonumber(ARGV[1])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
elseif redis.call('HEXISTS', peers, field_of(epoch)) == 0 then
  return redis.error_reply('STALE_EPOCH its card, which peers need to read from it, is lost')
end
local entry = entry_of(epoch)
entry[DEADLINE_S] = now_s + entry[LEASE_S]
keep_entry(epoch, entry)
redis.call('HSETNX', names, entry[NAME], field_of(epoch))
return memory_name()
