-- The server's clock, seconds since 1970.
local function server_s()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end
