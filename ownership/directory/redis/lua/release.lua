-- Give up ownership or replicas. `OwnershipDirectory.release`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, msgpack [chunk, state type, token (0: a replica), ...]
-- Returns: nothing. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs runs records

local epoch, released = tonumber(ARGV[1]), cmsgpack.unpack(ARGV[2])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

local function is_own(replica)
  return replica[HOLDER] == epoch
end

for index = 1, #released, 3 do
  local chunk, state_type, token = unpack(released, index, index + 2)
  local place = place_of(chunk)
  if place then
    local record, at = record_in(place, state_type)
    if record then
      if token == 0 then
        drop_replicas(record, is_own)
      elseif record[OWNER] == epoch and record[TOKEN] == token then
        record[OWNER] = NO_EPOCH
      end
      settle(place, at, now_s)
    end
  end
end
write_records()
return false
