-- Chunks of one chain stored together, so that a long chain is read in few pieces. Needs: fleet,
-- chunks, runs.
--
-- A run is a path in the tree of chains, at most RUN_CHUNKS long, named by its first chunk.
-- chunks: hash, chunk key (16 bytes) -> one of
--   the keys of a run's chunks, one after another      under its first chunk
--   '\2' | first chunk of the run that holds it         a pointer
-- runs: hash, first chunk -> '\1' | msgpack [entry of each chunk]. The first byte is the format.
-- The entry of a chunk is msgpack, see records.lua; only a run's first chunk may have none ('').
--
-- A chunk whose key has a certain form begins a run (`begins_run`). So a caller knows the names of
-- most runs from the chain alone, and can fetch them without this interpreter, which hashes every
-- string it meets. Other runs begin where a chain leaves another, or where a run is full.
-- Data that cannot be decoded counts as absent and is overwritten.
--
-- fleet.fields: the number of fields of `chunks` and `runs` together, see memory.lua.

local ENTRIES, POINTER = '\1', '\2'
local RUN_CHUNKS = 256
local KEY = 16

local loaded = {}
local changed = {}
local num_fields_added = 0

local function set_field(key, field, value)
  num_fields_added = num_fields_added + redis.call('HSET', key, field, value)
end

local function delete_field(key, field)
  num_fields_added = num_fields_added - redis.call('HDEL', key, field)
end

-- True for one chunk in 64. `scripts.run_starts` computes the same.
local function begins_run(chunk)
  return string.byte(chunk, 1) % 64 == 0
end

-- The run's name if `value` is a pointer, else nil.
local function pointed_to(value)
  return #value == 1 + KEY and string.sub(value, 1, 1) == POINTER and string.sub(value, 2) or nil
end

local function run_from(head, keys)
  local packed = redis.call('HGET', runs, head)
  if not packed or string.sub(packed, 1, 1) ~= ENTRIES or string.sub(keys, 1, KEY) ~= head then
    return nil
  end
  local read, entries_of_run = pcall(cmsgpack.unpack, string.sub(packed, 2))
  if not read or type(entries_of_run) ~= 'table' or #entries_of_run * KEY ~= #keys then
    return nil
  end
  for index = 1, #entries_of_run do
    if type(entries_of_run[index]) ~= 'string' then
      return nil
    end
  end
  return { head = head, keys = keys, entries = entries_of_run }
end

-- The position of a chunk among keys, from 1, or nil.
local function position_in(keys, chunk)
  local from = 1
  while true do
    local found = string.find(keys, chunk, from, true)
    if not found then
      return nil
    elseif found % KEY == 1 then
      return (found - 1) / KEY + 1
    end
    from = found + 1
  end
end

local function load_run(head, keys)
  local run = loaded[head]
  if run == nil then
    keys = keys or redis.call('HGET', chunks, head)
    run = keys and run_from(head, keys) or false
    loaded[head] = run
  end
  return run
end

-- The run of a chunk and the chunk's position in it, or nil.
local function find_chunk(chunk)
  local run = loaded[chunk]
  if not run then
    local value = redis.call('HGET', chunks, chunk)
    if not value then
      return nil
    end
    local head = pointed_to(value)
    run = head and load_run(head) or load_run(chunk, value)
  end
  local position = run and position_in(run.keys, chunk)
  if not position then
    return nil
  end
  return run, position
end

-- Add a chunk: after `parent` if that ends a run that is not full, else in a new run.
local function add_chunk(chunk, parent)
  local run, position
  if not begins_run(chunk) then
    run, position = find_chunk(parent)
  end
  if run and position == #run.entries and position < RUN_CHUNKS then
    run.keys = run.keys .. chunk
    run.has_new_keys = true
    run.entries[position + 1] = ''
    set_field(chunks, chunk, POINTER .. run.head)
    return run, position + 1
  end
  run = { head = chunk, keys = chunk, has_new_keys = true, entries = { '' } }
  loaded[chunk] = run
  return run, 1
end

local function set_entry(run, position, entry)
  run.entries[position] = entry
  changed[run.head] = run
end

-- Forget a chunk. The first chunk of a run keeps its key while others follow.
local function remove_chunk(run, position)
  changed[run.head] = run
  if position == 1 then
    run.entries[1] = ''
    return
  end
  local from = (position - 1) * KEY
  delete_field(chunks, string.sub(run.keys, from + 1, from + KEY))
  run.keys = string.sub(run.keys, 1, from) .. string.sub(run.keys, from + KEY + 1)
  run.has_new_keys = true
  table.remove(run.entries, position)
end

-- Write the changes. Call it last.
local function write_runs()
  for head, run in pairs(changed) do
    if #run.entries == 1 and run.entries[1] == '' then
      delete_field(chunks, head)
      delete_field(runs, head)
      loaded[head] = nil
    else
      set_field(runs, head, ENTRIES .. cmsgpack.pack(run.entries))
      if run.has_new_keys then
        set_field(chunks, head, run.keys)
      end
    end
  end
  if num_fields_added ~= 0 then
    redis.call('HINCRBY', fleet, 'fields', num_fields_added)
  end
  changed, num_fields_added = {}, 0
end
