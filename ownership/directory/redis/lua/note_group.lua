-- Record that a request about the group used a chain. `SessionDirectory.note_group`.
-- KEYS: fleet epochs groups group_ends
-- ARGV: epoch, group, chain end (a chunk key), group_half_life_s, most groups
-- Returns: nothing. Errors: STALE_EPOCH.
-- USES: clock epochs sessions

local epoch = tonumber(ARGV[1])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end
use_group(ARGV[2], ARGV[3], now_s, tonumber(ARGV[4]), tonumber(ARGV[5]))
return false
