-- Directory time in seconds: the server's clock, made never to go back. If the clock is set back,
-- directory time stops for one reading and then goes on: an ended lease stays ended and a running
-- lease is not prolonged. A value that no script wrote is replaced. Needs: fleet.

-- A double as text, exactly.
local function exact(number)
  return string.format('%.17g', number)
end

-- The time. Scripts that only read store it, too: an epoch that one caller saw end must not live
-- again.
local MOST_OFF_S = 1e11

local function tick_s()
  local raw_s = server_s()
  local kept = redis.call('HMGET', fleet, 'raw_s', 'now_s')
  local last_raw_s, last_s = tonumber(kept[1] or nil), tonumber(kept[2] or nil)
  local now_s = raw_s
  if last_raw_s and last_s and math.abs(last_s - last_raw_s) < MOST_OFF_S then
    now_s = last_s + math.max(0, raw_s - last_raw_s)
  end
  redis.call('HSET', fleet, 'raw_s', exact(raw_s), 'now_s', exact(now_s))
  return now_s
end
