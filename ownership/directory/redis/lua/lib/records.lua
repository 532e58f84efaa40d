-- The record of each artifact. Needs: fleet, epochs, chunks, runs.
--
-- The entry of a chunk: msgpack [record, ...], one for each state type that has one;
-- a record: [state type, owner, token, copy, replica...]; a replica: [holder, copy, expires_s].
-- `copy` is opaque here except for its size, see `encoding.pack_copy`.

local TYPE, OWNER, TOKEN, COPY, FIRST_REPLICA = 1, 2, 3, 4, 5
local HOLDER, REPLICA_COPY, EXPIRES_S = 1, 2, 3
-- What workers decode. A record that only the scripts took for one would hide its chunk from all
-- lookups, and no claim would overwrite it.
local STATE_TYPES, COPY_BYTES = 9, 41

local decoded = {}
local num_added = 0

local function is_whole(value)
  return type(value) == 'number' and value >= 0 and value <= 2 ^ 53 and value == math.floor(value)
end

local function is_replica(value)
  return type(value) == 'table' and is_whole(value[HOLDER])
    and type(value[REPLICA_COPY]) == 'string' and #value[REPLICA_COPY] == COPY_BYTES
    and type(value[EXPIRES_S]) == 'number'
end

local function is_record(value)
  if type(value) ~= 'table' or not is_whole(value[TYPE]) or value[TYPE] >= STATE_TYPES
    or not is_whole(value[OWNER]) or not is_whole(value[TOKEN])
    or type(value[COPY]) ~= 'string' or #value[COPY] ~= COPY_BYTES then
    return false
  end
  for index = FIRST_REPLICA, #value do
    if not is_replica(value[index]) then
      return false
    end
  end
  return true
end

-- The records of an entry. One that cannot be decoded has none, so it is overwritten.
local function records_from(entry)
  local read, found = pcall(cmsgpack.unpack, entry)
  if entry == '' or not read or type(found) ~= 'table' then
    return {}
  end
  local records = {}
  for index = 1, #found do
    if not is_record(found[index]) then
      return {}
    end
    records[index] = found[index]
  end
  return records
end

-- The place of a chunk during this call: its run and records. It is made if `parent` is given.
local function place_of(chunk, parent)
  local place = decoded[chunk]
  if place then
    return place
  end
  local run, position = find_chunk(chunk)
  if not run then
    if not parent then
      return nil
    end
    run, position = add_chunk(chunk, parent)
  end
  place = { run = run, records = records_from(run.entries[position]) }
  decoded[chunk] = place
  return place
end

local function record_in(place, state_type)
  for index, record in ipairs(place.records) do
    if record[TYPE] == state_type then
      return record, index
    end
  end
  return nil
end

local function add_record(place, record)
  table.insert(place.records, record)
  num_added = num_added + 1
  place.changed = true
end

local function is_listed(replica, now_s)
  return replica[EXPIRES_S] > now_s and status_of(replica[HOLDER], now_s) ~= ENDED
end

local function has_listed(record, now_s)
  for index = FIRST_REPLICA, #record do
    if is_listed(record[index], now_s) then
      return true
    end
  end
  return false
end

-- Drop the replicas for which `drop` returns true.
local function drop_replicas(record, drop)
  for index = #record, FIRST_REPLICA, -1 do
    if drop(record[index]) then
      table.remove(record, index)
    end
  end
end

local function replica_of(record, epoch)
  for index = FIRST_REPLICA, #record do
    if record[index][HOLDER] == epoch then
      return record[index]
    end
  end
  return nil
end

-- Keep a changed record, or forget it if it names neither an owner nor a live replica.
local function settle(place, index, now_s)
  place.changed = true
  local record = place.records[index]
  if record[OWNER] == NO_EPOCH and not has_listed(record, now_s) then
    table.remove(place.records, index)
    num_added = num_added - 1
  end
end

-- True if another epoch owns it and its lease lasts.
local function is_foreign(record, epoch, now_s)
  local owner = record[OWNER]
  return owner ~= NO_EPOCH and owner ~= epoch and status_of(owner, now_s) ~= ENDED
end

-- Make `epoch` the owner, under a new token unless it is the owner already. A claim that changes
-- nothing costs no write, because owners repeat all their claims in case records were lost.
local function take(place, record, epoch, copy)
  if record[OWNER] == epoch and record[COPY] == copy and not replica_of(record, epoch) then
    return
  elseif record[OWNER] ~= epoch then
    record[OWNER], record[TOKEN] = epoch, next_in_sequence()
  end
  record[COPY] = copy
  drop_replicas(record, function(replica) return replica[HOLDER] == epoch end)
  place.changed = true
end

-- Write the changes. Call it last.
local function write_records()
  for chunk, place in pairs(decoded) do
    if place.changed then
      local position = position_in(place.run.keys, chunk)
      if #place.records == 0 then
        remove_chunk(place.run, position)
      else
        set_entry(place.run, position, cmsgpack.pack(place.records))
      end
    end
  end
  write_runs()
  if num_added ~= 0 then
    redis.call('HINCRBY', fleet, 'artifacts', num_added)
  end
end

-- Artifacts with a record, those of this call included.
local function num_artifacts()
  return (number_in(redis.call('HGET', fleet, 'artifacts')) or 0) + num_added
end
