-- Return the records of a chain, in as few pieces as they are stored in. `OwnershipDirectory.lookup`.
-- KEYS: fleet epochs chunks runs
-- ARGV: the chain's keys, 16 bytes each, one after another; '1' if the caller fetches, in the same
--       transaction, the runs that begin at the chain's first chunk and at the chunks for which
--       `begins_run` holds, else ''
-- Returns: [now_s as text,
--           [epoch, msgpack entry (epochs.lua), ...],
--           [first chunk asked for, its position in the run, number of chunks, run, ...] from 0,
--           [run as it is stored (runs.lua), ...]].
--          A run is an index into the last list, or -1 for one that the caller fetches, which
--          begins at `first chunk asked for - position`.
-- USES: clock epochs runs

local chain, is_fetched_apart = ARGV[1], ARGV[2] == '1'
local length = math.floor(#chain / KEY)
local spans, values, index_of = {}, {}, {}

local sub = string.sub
local function key_at(index)
  return sub(chain, index * KEY + 1, index * KEY + KEY)
end

-- The number of chunks that the chain from `index` and the keys from `position` (both from 0) have
-- in common.
local function common_length(keys, index, position)
  if position == 0 and string.find(chain, keys, index * KEY + 1, true) == index * KEY + 1 then
    return math.floor(#keys / KEY)
  end
  local most = math.min(math.floor(#keys / KEY) - position, length - index)
  for count = 0, most - 1 do
    local from = (position + count) * KEY
    if string.sub(keys, from + 1, from + KEY) ~= key_at(index + count) then
      return count
    end
  end
  return most
end

-- The first stored chunk at or after `index`, and its value. Most prompts are unknown, so missing
-- chunks are skipped in growing steps.
local function next_stored(index)
  if index >= length then
    return nil
  end
  local value = redis.call('HGET', chunks, key_at(index))
  if value then
    return index, value
  end
  local from, step = index + 1, 8
  while from < length do
    local keys, count = {}, math.min(step, length - from)
    for ahead = 1, count do
      keys[ahead] = key_at(from + ahead - 1)
    end
    local found = redis.call('HMGET', chunks, unpack(keys))
    for ahead = 1, count do
      if found[ahead] then
        return from + ahead - 1, found[ahead]
      end
    end
    from, step = from + count, math.min(step * 8, 512)
  end
  return nil
end

-- The index of the run `head` in the answer, or -1; nil if the run is missing. Its chunk `position`
-- is the chain's `index`.
local function source_of(head, index, position)
  local is_fetched = is_fetched_apart and index >= position
    and (index == position or begins_run(head)) and key_at(index - position) == head
  if is_fetched then
    return -1
  elseif not index_of[head] then
    local value = redis.call('HGET', runs, head)
    if not value then
      return nil
    end
    values[#values + 1] = value
    index_of[head] = #values - 1
  end
  return index_of[head]
end

local index, value = next_stored(0)
while index do
  local head = pointed_to(value)
  local keys = head and redis.call('HGET', chunks, head) or value
  head = head or key_at(index)
  local position = keys and (head == key_at(index) and 1 or position_in(keys, key_at(index)))
  local taken = position and common_length(keys, index, position - 1) or 0
  local source = taken > 0 and source_of(head, index, position - 1)
  if source then
    local at = #spans
    spans[at + 1], spans[at + 2], spans[at + 3], spans[at + 4] = index, position - 1, taken, source
  end
  index, value = next_stored(index + math.max(taken, 1))
end
return { exact(tick_s()), redis.call('HGETALL', epochs), spans, values }
