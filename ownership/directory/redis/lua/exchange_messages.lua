-- Append a router's message, and read those after a cursor. `RedisMessageLog`.
-- KEYS: messages
-- ARGV: message ("" for none), cursor, most messages to return, seconds for which messages are kept
-- Returns: the id of the newest message, then an id and a message for each one after the cursor.
-- USES: clock

if ARGV[1] ~= '' then
  local kept_s = tonumber(ARGV[4])
  local oldest_ms = string.format('%.0f', (server_s() - kept_s) * 1000)
  redis.call('XADD', messages, 'MINID', '~', oldest_ms, '*', 'm', ARGV[1])
  redis.call('EXPIRE', messages, math.ceil(2 * kept_s))
end
local newest = redis.call('XREVRANGE', messages, '+', '-', 'COUNT', 1)[1]
local found = {newest and newest[1] or '0-0'}
for _, entry in ipairs(redis.call('XRANGE', messages, '(' .. ARGV[2], '+', 'COUNT', ARGV[3])) do
  found[#found + 1] = entry[1]
  found[#found + 1] = entry[2][2]
end
return found
