-- Who reads which chunk. Needs: epochs, readers, used.
--
-- readers: hash, chunk -> msgpack [epoch, reader, ...]. used: sorted set, chunk by the
-- directory time of its last use.

local function readers_of(chunk)
  local packed = redis.call('HGET', readers, chunk)
  return packed and cmsgpack.unpack(packed) or {}
end

local function keep_readers(chunk, found)
  if #found == 0 then
    redis.call('HDEL', readers, chunk)
  else
    redis.call('HSET', readers, chunk, cmsgpack.pack(found))
  end
end

local function position_of(found, epoch, reader)
  for index = 1, #found, 2 do
    if found[index] == epoch and found[index + 1] == reader then
      return index
    end
  end
  return nil
end

-- Only those whose worker's lease lasts.
local function live_readers(found, now_s)
  local live = {}
  for index = 1, #found, 2 do
    if standing(found[index], now_s) == LIVE then
      table.insert(live, found[index])
      table.insert(live, found[index + 1])
    end
  end
  return live
end
