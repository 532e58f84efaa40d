-- Own artifacts unless another epoch's ownership lasts. `OwnershipDirectory.claim_owner`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, most artifacts, msgpack [chunk, parent chunk, state type, copy, ...]
-- Returns: [outcome, owner, token, ...]; outcomes as in `outcomes.lua`. Errors: STALE_EPOCH.
-- USES: clock epochs runs holdings outcomes

local epoch, max_artifacts = tonumber(ARGV[1]), tonumber(ARGV[2])
local claims = cmsgpack.unpack(ARGV[3])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

local room = max_artifacts - num_artifacts()
for index = 1, #claims, 4 do
  local chunk, parent, state_type, copy = unpack(claims, index, index + 3)
  local place = place_of(chunk)
  local holding = place and holding_in(place, state_type)
  if not holding and num_added >= room then
    answer(FULL, NOBODY, NO_TOKEN)
  elseif not holding then
    holding = { state_type, epoch, next_in_sequence(), copy }
    add_holding(place_of(chunk, parent), holding)
    answer(OWNED, epoch, holding[TOKEN])
  elseif is_held(holding, epoch, now_s) then
    answer(HELD, holding[OWNER], holding[TOKEN])
  else
    take(place, holding, epoch, copy)
    answer(OWNED, epoch, holding[TOKEN])
  end
end
write_holdings()
return answers
