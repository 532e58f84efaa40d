-- The users of each chunk. Needs: epochs, readers.
--
-- readers: hash, chunk -> msgpack [epoch, user, ...].

-- The users that can be decoded.
local function users_of(chunk)
  local is_read, found = pcall(cmsgpack.unpack, redis.call('HGET', readers, chunk) or '')
  local known = {}
  for index = 1, is_read and type(found) == 'table' and #found or 0, 2 do
    if type(found[index]) == 'number' and type(found[index + 1]) == 'string' then
      table.insert(known, found[index])
      table.insert(known, found[index + 1])
    end
  end
  return known
end

local function keep_users(chunk, found)
  if #found == 0 then
    redis.call('HDEL', readers, chunk)
  else
    redis.call('HSET', readers, chunk, cmsgpack.pack(found))
  end
end

local function position_of(found, epoch, user)
  for index = 1, #found, 2 do
    if found[index] == epoch and found[index + 1] == user then
      return index
    end
  end
  return nil
end

-- The users whose worker's lease lasts.
local function live_users(found, now_s)
  local live = {}
  for index = 1, #found, 2 do
    if status_of(found[index], now_s) == LIVE then
      table.insert(live, found[index])
      table.insert(live, found[index + 1])
    end
  end
  return live
end
