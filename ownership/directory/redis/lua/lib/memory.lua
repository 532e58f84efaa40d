-- The name of the memory that holds the records: if the name changes, records may be lost.
-- Needs: fleet, chunks, runs, epochs.lua (for numbers).
--
-- The name changes with the server process (a restart, a failover to a replica that lagged), and
-- when `chunks` and `runs` have another number of fields than the scripts left in them (fields were
-- evicted or deleted). fleet.memory: the last such loss. fleet.fields: that number, see runs.lua.

local MOST_TYPES = 64  -- more state types than a chunk can have

local function run_id()
  local info = redis.pcall('INFO', 'server')  -- a Redis user may lack the right to ask
  return type(info) == 'string' and string.match(info, 'run_id:(%w+)') or ''
end

-- The count of artifacts shrinks in proportion, because it is unknown which ones were lost.
local function note_loss(known, found)
  local artifacts = number_in(redis.call('HGET', fleet, 'artifacts'))
  if artifacts and known and known > 0 then
    artifacts = math.floor(artifacts * math.min(1, found / known))
  else
    artifacts = found
  end
  redis.call('HSET', fleet, 'fields', found, 'artifacts', field_of(artifacts),
    'memory', field_of(next_in_sequence()))
end

local function memory_name()
  local kept = redis.call('HMGET', fleet, 'fields', 'memory', 'artifacts')
  local known, found = number_in(kept[1]), redis.call('HLEN', chunks) + redis.call('HLEN', runs)
  local artifacts = number_in(kept[3] or '0')
  local is_sound = artifacts and artifacts <= MOST_TYPES * found
  if (known or 0) ~= found or not kept[2] or not is_sound then
    note_loss(is_sound and known, found)
    kept[2] = redis.call('HGET', fleet, 'memory')
  end
  return run_id() .. '/' .. kept[2]
end
