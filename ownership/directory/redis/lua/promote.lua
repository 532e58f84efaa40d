-- Own what the caller has a replica of, where the owner is gone. `OwnershipDirectory.promote`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, msgpack [chunk, state type, ...]
-- Returns: [outcome, owner, token, ...]. Errors: STALE_EPOCH.
-- USES: clock epochs runs holdings outcomes

local epoch, artifacts = tonumber(ARGV[1]), cmsgpack.unpack(ARGV[2])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

for index = 1, #artifacts, 2 do
  local chunk, state_type = artifacts[index], artifacts[index + 1]
  local place = place_of(chunk)
  local holding = place and holding_in(place, state_type)
  if not holding then
    answer(ABSENT, NOBODY, NO_TOKEN)
  elseif holding[OWNER] == epoch then
    answer(OWNED, epoch, holding[TOKEN])
  elseif is_held(holding, epoch, now_s) then
    answer(HELD, holding[OWNER], holding[TOKEN])
  else
    local own = replica_of(holding, epoch)
    if own and is_listed(own, now_s) then
      take(place, holding, epoch, own[REPLICA_COPY])
      answer(OWNED, epoch, holding[TOKEN])
    else
      answer(ABSENT, holding[OWNER], holding[TOKEN])
    end
  end
end
write_holdings()
return answers
