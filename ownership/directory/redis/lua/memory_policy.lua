-- Return what the server does when its memory is full. `RedisDirectory.eviction_policy`.
-- KEYS: fleet
-- ARGV: none
-- Returns: [maxmemory in bytes or empty, maxmemory_policy or empty].
-- USES: clock

local info = redis.pcall('INFO', 'memory')
local text = type(info) == 'string' and info or ''
return {
  string.match(text, 'maxmemory:(%d+)') or '',
  string.match(text, 'maxmemory_policy:([%w-]+)') or '',
}
