-- Forget records without a use. `OwnershipDirectory.sweep`.
-- KEYS: fleet epochs chunks runs readers names peers
-- ARGV: about how many records to look at, orphan_ttl_s, most artifacts
-- Returns: the number of artifacts whose records were forgotten; each field left of a loss is one.
-- USES: clock epochs runs records chain_users

local limit, orphan_ttl_s, max_artifacts = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now_s = tick_s()
local oldest_s = now_s - orphan_ttl_s
-- A full directory keeps no orphans.
local oldest_orphan_s = num_artifacts() < max_artifacts and oldest_s or now_s

-- About the next `count` fields of a hash. The cursor is kept in the fleet's hash.
local function scan(key, cursor_field, count)
  local cursor = redis.call('HGET', fleet, cursor_field) or '0'
  local answer = redis.call('HSCAN', key, string.match(cursor, '^%d+$') or '0', 'COUNT', count)
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

local function sweep_run(run)
  for position = 0, #run.entries - 1 do
    local chunk = string.sub(run.keys, position * KEY + 1, position * KEY + KEY)
    local place = place_of(chunk)
    if place then  -- else the index does not have it
      sweep_chunk(place)
    end
  end
end

-- A lost run leaves its first chunk and pointers, a lost first chunk leaves its run. Nothing else
-- looks for them.
local scanned = scan(chunks, 'chunk_cursor', limit)
for index = 1, #scanned, 2 do
  local chunk, value = scanned[index], scanned[index + 1]
  local head = pointed_to(value)
  local run = not head and load_run(chunk, value)
  if run then
    sweep_run(run)
  elseif not head then
    delete_field(chunks, chunk)
    delete_field(runs, chunk)
  elseif not position_in(redis.call('HGET', chunks, head) or '', chunk) then
    delete_field(chunks, chunk)
  end
end
-- A run has the records of 64 chunks on average (`begins_run`).
scanned = scan(runs, 'run_cursor', math.ceil(limit / 64))
for index = 1, #scanned, 2 do
  local keys = redis.call('HGET', chunks, scanned[index])
  if not keys or pointed_to(keys) then
    delete_field(runs, scanned[index])
  end
end

-- It is unknown which artifacts they were, so the count shrinks in proportion, as in memory.lua.
-- No other field has been added or deleted by now.
local num_left = -num_fields_added
local num_forgotten = num_left - num_added
if num_left > 0 then
  local num_fields = number_in(redis.call('HGET', fleet, 'fields')) or 0
  local share = num_left / math.max(num_left, num_fields)
  local num_lost = math.floor((num_artifacts() - num_added) * share + 0.5)
  num_added = num_added - math.max(0, math.min(num_lost, num_artifacts()))
end
write_records()

scanned = scan(readers, 'reader_cursor', limit)
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
