-- Return the records of sessions. `SessionDirectory.sessions`.
-- KEYS: fleet sessions
-- ARGV: session_ttl_s, session id, ...
-- Returns: [msgpack session (lib/sessions.lua), or empty if it is unknown, ...].
-- USES: clock

local USED_S = 8

local oldest_s = tick_s() - tonumber(ARGV[1])
local found = {}
for index = 2, #ARGV do
  local packed = redis.call('HGET', sessions, ARGV[index])
  local is_read, session = pcall(cmsgpack.unpack, packed or '')
  local used_s = is_read and type(session) == 'table' and session[USED_S]
  found[index - 1] = type(used_s) == 'number' and used_s > oldest_s and packed or ''
end
return found
