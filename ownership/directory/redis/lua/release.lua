-- Give up ownership or replicas. `OwnershipDirectory.release`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, msgpack [chunk, state type, token (0: a replica), ...]
-- Returns: nothing. Errors: STALE_EPOCH.
-- USES: clock epochs runs holdings

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
    local holding, at = holding_in(place, state_type)
    if holding then
      if token == 0 then
        drop_replicas(holding, is_own)
      elseif holding[OWNER] == epoch and holding[TOKEN] == token then
        holding[OWNER] = NOBODY
      end
      settle(place, at, now_s)
    end
  end
end
write_holdings()
return false
