-- List transient replicas. `OwnershipDirectory.replicate_readonly`.
-- KEYS: fleet epochs chunks runs
-- ARGV: epoch, ttl_s, most replicas of an artifact, msgpack [chunk, state type, copy, ...]
-- Returns: [outcome, owner, token, ...]. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs runs records outcomes

local epoch, ttl_s, max_replicas = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local copies = cmsgpack.unpack(ARGV[4])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

local function is_own_or_expired(replica)
  return replica[HOLDER] == epoch or not is_listed(replica, now_s)
end

for index = 1, #copies, 3 do
  local chunk, state_type, copy = unpack(copies, index, index + 2)
  local place = place_of(chunk)
  local record, at
  if place then
    record, at = record_in(place, state_type)
  end
  if not record then
    answer(ABSENT, NO_EPOCH, NO_TOKEN)
  elseif record[OWNER] == epoch then
    answer(OWNED, epoch, record[TOKEN])
  else
    local before = #record
    drop_replicas(record, is_own_or_expired)
    local is_full = #record - COPY >= max_replicas
    if not is_full then
      table.insert(record, { epoch, copy, now_s + ttl_s })
    end
    answer(is_full and FULL or REPLICA, record[OWNER], record[TOKEN])
    if not is_full or #record ~= before then
      settle(place, at, now_s)
    end
  end
end
write_records()
return answers
