-- List transient replicas. `OwnershipDirectory.replicate_readonly`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, ttl_s, most replicas of an artifact, msgpack [chunk, state type, copy, ...]
-- Returns: [outcome, owner, token, ...]. Errors: STALE_EPOCH.
-- USES: clock epochs runs holdings outcomes

local epoch, ttl_s, max_replicas = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local copies = cmsgpack.unpack(ARGV[4])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

local function is_own_or_gone(replica)
  return replica[HOLDER] == epoch or not is_listed(replica, now_s)
end

for index = 1, #copies, 3 do
  local chunk, state_type, copy = unpack(copies, index, index + 2)
  local place = place_of(chunk)
  local holding, at
  if place then
    holding, at = holding_in(place, state_type)
  end
  if not holding then
    answer(ABSENT, NOBODY, NO_TOKEN)
  elseif holding[OWNER] == epoch then
    answer(OWNED, epoch, holding[TOKEN])
  else
    drop_replicas(holding, is_own_or_gone)
    local is_full = #holding - COPY >= max_replicas
    if not is_full then
      table.insert(holding, { epoch, copy, now_s + ttl_s })
    end
    answer(is_full and FULL or REPLICA, holding[OWNER], holding[TOKEN])
    settle(place, at, now_s)
  end
end
write_holdings()
return answers
