-- Become the owner of artifacts unless another epoch owns them. `OwnershipDirectory.claim_owner`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, most artifacts, msgpack [chunk, parent chunk, state type, copy, ...]
-- Returns: [outcome, owner, token, ...]; outcomes as in `outcomes.lua`. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs runs records outcomes

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
  local record = place and record_in(place, state_type)
  if not record and num_added >= room then
    answer(FULL, NO_EPOCH, NO_TOKEN)
  elseif not record then
    record = { state_type, epoch, next_in_sequence(), copy }
    add_record(place_of(chunk, parent), record)
    answer(OWNED, epoch, record[TOKEN])
  elseif is_foreign(record, epoch, now_s) then
    answer(FOREIGN, record[OWNER], record[TOKEN])
  else
    take(place, record, epoch, copy)
    answer(OWNED, epoch, record[TOKEN])
  end
end
write_records()
return answers
