-- Make a new epoch for a worker, and retire its earlier one. `OwnershipDirectory.register`.
-- KEYS: fleet epochs names peers chunks runs
-- ARGV: format version, name, storage, peer metadata, lease_s, floor, most workers
-- Returns: [the epoch, memory_name() of memory.lua]. Errors: FORMAT (a fleet of another version),
--          WORKERS (too many are live).
-- USES: clock epochs memory

local format, name, storage, peer = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease_s, floor, max_workers = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local written = redis.call('HGET', fleet, 'format')
if written and written ~= format then
  return redis.error_reply('FORMAT ' .. written)
end
local now_s = tick_s()

local function forget(epoch, entry)
  redis.call('HDEL', epochs, field_of(epoch))
  redis.call('HDEL', peers, field_of(epoch))
  if redis.call('HGET', names, entry[NAME]) == field_of(epoch) then
    redis.call('HDEL', names, entry[NAME])
  end
end

if redis.call('HLEN', epochs) >= max_workers then
  local oldest, oldest_entry
  local all = redis.call('HGETALL', epochs)
  for index = 1, #all, 2 do
    local epoch = number_in(all[index])
    local entry = epoch and entry_of(epoch)
    if not entry then  -- it cannot be decoded
      redis.call('HDEL', epochs, all[index])
      redis.call('HDEL', peers, all[index])
    elseif entry[DEADLINE_S] <= now_s
      and (not oldest_entry or entry[DEADLINE_S] < oldest_entry[DEADLINE_S]) then
      oldest, oldest_entry = epoch, entry
    end
  end
  if oldest then
    forget(oldest, oldest_entry)
  elseif redis.call('HLEN', epochs) >= max_workers then
    return redis.error_reply('WORKERS ' .. max_workers .. ' epochs are live')
  end
end

redis.call('HSET', fleet, 'format', format)
local memory = memory_name()
local epoch = next_in_sequence()
if epoch <= floor and floor < LAST_NUMBER then  -- this server's clock is behind
  epoch = floor + 1
  redis.call('HSET', fleet, 'sequence', field_of(epoch))
end

local earlier = number_in(redis.call('HGET', names, name))
if earlier and entry_of(earlier) then
  local entry = entry_of(earlier)
  entry[IS_RETIRED] = true
  keep_entry(earlier, entry)
end
redis.call('HSET', names, name, field_of(epoch))
redis.call('HSET', peers, field_of(epoch), peer)
keep_entry(epoch, { name, storage, lease_s, now_s + lease_s, false })
return { epoch, memory }
