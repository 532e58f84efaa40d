-- Epochs and their status. Needs: fleet, epochs.
--
-- epochs: hash, epoch -> msgpack [name, storage, lease_s, deadline_s, retired].
-- An epoch that cannot be decoded has ended.
-- fleet.sequence: the last epoch or token handed out, one counter for both. It never falls behind
-- the clock in microseconds: a Redis replica that is promoted, or a snapshot that is read, may lack
-- the last numbers, and must not hand them out again. No number is greater than LAST_NUMBER: a clock
-- beyond the year 2112 is ignored, and a greater sequence, which no script wrote, is replaced.

local NAME, STORAGE, LEASE_S, DEADLINE_S, IS_RETIRED = 1, 2, 3, 4, 5
local LIVE, RETIRED, ENDED = 0, 1, 2
local NO_EPOCH = 0
local LAST_NUMBER = 2 ^ 52
local MOST_LEASE_S = 1e7

local entries = {}

-- A field as a number that may have been handed out; else nil.
local function number_in(text)
  local number = tonumber(text or nil)
  local is_one = number and number >= 0 and number < LAST_NUMBER and number == math.floor(number)
  return is_one and number or nil
end

-- The field of an epoch: its digits, never an exponent.
local function field_of(epoch)
  return string.format('%.0f', epoch)
end

local function is_entry(value)
  return type(value) == 'table' and type(value[NAME]) == 'string' and type(value[STORAGE]) == 'string'
    and type(value[LEASE_S]) == 'number' and value[LEASE_S] <= MOST_LEASE_S
    and type(value[DEADLINE_S]) == 'number' and value[DEADLINE_S] == value[DEADLINE_S]
    and type(value[IS_RETIRED]) == 'boolean' and #value == IS_RETIRED
end

local function entry_of(epoch)
  local entry = entries[epoch]
  if entry == nil then
    local packed = redis.call('HGET', epochs, field_of(epoch))
    local is_read, value = pcall(cmsgpack.unpack, packed or '')
    entry = is_read and is_entry(value) and value or false
    entries[epoch] = entry
  end
  return entry
end

-- All epochs that can be decoded, as numbers.
local function known_epochs()
  local known = {}
  for _, field in ipairs(redis.call('HKEYS', epochs)) do
    local epoch = number_in(field)
    if epoch and entry_of(epoch) then
      known[#known + 1] = epoch
    end
  end
  return known
end

local function keep_entry(epoch, entry)
  entries[epoch] = entry
  redis.call('HSET', epochs, field_of(epoch), cmsgpack.pack(entry))
end

local function status_of(epoch, now_s)
  local entry = entry_of(epoch)
  -- No script writes a deadline farther off than a lease.
  if not entry or entry[DEADLINE_S] <= now_s or entry[DEADLINE_S] > now_s + entry[LEASE_S] + 1 then
    return ENDED
  end
  return entry[IS_RETIRED] and RETIRED or LIVE
end

-- True if the epoch ended at or before `moment_s`, or is unknown.
local function has_ended_before(epoch, moment_s)
  local entry = entry_of(epoch)
  return not entry or entry[DEADLINE_S] <= moment_s or entry[DEADLINE_S] ~= entry[DEADLINE_S]
end

-- The error to return if the epoch may change nothing, with the reason; else nil.
local function refusal(epoch, now_s)
  local status = status_of(epoch, now_s)
  if status == RETIRED then
    return redis.error_reply('RETIRED_EPOCH its worker has registered again')
  elseif status == ENDED then
    return redis.error_reply('STALE_EPOCH its lease has ended')
  end
  return nil
end

local is_caught_up = false

local function next_in_sequence()
  if not is_caught_up then
    is_caught_up = true
    local known = number_in(redis.call('HGET', fleet, 'sequence')) or 0
    local now_us = math.floor(server_s() * 1e6)
    local from = now_us < LAST_NUMBER / 2 and math.max(known, now_us) or known
    redis.call('HSET', fleet, 'sequence', field_of(from))
  end
  return redis.call('HINCRBY', fleet, 'sequence', 1)
end
