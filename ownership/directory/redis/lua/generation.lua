-- Return the fleet's generation, and those that its live workers have adopted. `GenerationDirectory.generation`.
-- KEYS: fleet epochs adopted
-- ARGV: none
-- Returns: [the fleet's, worker's name, its adopted generation, ...], numbers as text.
-- USES: clock epochs generations

local now_s = tick_s()
local answer = { string.format('%.0f', generation()) }
for _, epoch in ipairs(known_epochs()) do
  if status_of(epoch, now_s) == LIVE then
    table.insert(answer, entry_of(epoch)[NAME])
    table.insert(answer, field_of(number_in(redis.call('HGET', adopted, field_of(epoch))) or 0))
  end
end
return answer
