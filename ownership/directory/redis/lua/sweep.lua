-- Forget records without a use. `OwnershipDirectory.sweep`.
-- KEYS: fleet epochs chunks runs readers names peers
-- ARGV: about how many records to look at, orphan_ttl_s, most artifacts
-- Returns: the number of artifacts whose records were forgotten.
-- USES: clock epochs runs records chain_users

local limit, orphan_ttl_s, max_artifacts = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now_s = tick_s()
local oldest_s = now_s - orphan_ttl_s
-- A full directory keeps no orphans.
local oldest_orphan_s = num_artifacts() < max_artifacts and oldest_s or now_s

-- The next `limit` fields of a hash. The cursor is kept in the fleet's hash.
local function scan(key, cursor_field)
  local cursor = redis.call('HGET', fleet, cursor_field) or '0'
  local answer = redis.call('HSCAN', key, string.match(cursor, '^%d+$') or '0', 'COUNT', limit)
  redis.call('HSET', fleet, cursor_field, answer[1])
  return answer[2]
end

local function is_expired(replica)
  return not is_listed(replica, now_s)
end

local function sweep_chunk(place)
  for at = #place.records, 1, -1 do
    local record = place.records[at]
    local replicas = #record
    drop_replicas(record, is_expired)
    local is_orphan = #record == COPY and has_ended_before(record[OWNER], oldest_orphan_s)
    if is_orphan then
      record[OWNER] = NO_EPOCH
    end
    if is_orphan or #record ~= replicas then
      settle(place, at, now_s)
    end
  end
end

local scanned = scan(chunks, 'chunk_cursor')
for index = 1, #scanned, 2 do
  local keys = scanned[index + 1]
  local run = not pointed_to(keys) and load_run(scanned[index], keys)
  for position = 0, run and #run.entries - 1 or -1 do
    local chunk = string.sub(run.keys, position * KEY + 1, position * KEY + KEY)
    local place = place_of(chunk)
    if place then  -- else the index does not have it
      sweep_chunk(place)
    end
  end
end
local num_forgotten = -num_added
write_records()

scanned = scan(readers, 'reader_cursor')
for index = 1, #scanned, 2 do
  keep_users(scanned[index], live_users(users_of(scanned[index]), now_s))
end

for _, field in ipairs(redis.call('HKEYS', epochs)) do
  local epoch = number_in(field)
  if not epoch or has_ended_before(epoch, oldest_s) then
    local entry = epoch and entry_of(epoch)
    redis.call('HDEL', epochs, field)
    redis.call('HDEL', peers, field)
    if entry and redis.call('HGET', names, entry[NAME]) == field then
      redis.call('HDEL', names, entry[NAME])
    end
  end
end
return num_forgotten
