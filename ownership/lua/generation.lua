-- The fleet's generation and who has adopted which. `GenerationDirectory.generation`.
-- KEYS: fleet epochs adopted
-- ARGV: none
-- Returns: [the fleet's, worker's name, what it has adopted, ...], numbers as text.
-- USES: clock epochs generations

local now_s = tick_s()
local answer = { string.format('%.0f', generation()) }
for _, field in ipairs(redis.call('HKEYS', epochs)) do
  if standing(tonumber(field), now_s) == LIVE then
    table.insert(answer, entry_of(tonumber(field))[NAME])
    table.insert(answer, redis.call('HGET', adopted, field) or '0')
  end
end
return answer
