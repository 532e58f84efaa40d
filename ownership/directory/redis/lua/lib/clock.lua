-- Directory time in seconds: this server's clock, made to never go back. Set back, it stands
-- still for a moment and then goes on, so an ended lease stays ended and a running one is not
-- prolonged. What somebody else has written in its place is begun anew. Needs: fleet.

-- A double as text that reads back as the same double.
local function exact(number)
  return string.format('%.17g', number)
end

-- Now. Notes it, in scripts that only read too: what one caller saw end must not live again.
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
