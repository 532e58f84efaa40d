-- Begin a new generation, greater than any before. `GenerationDirectory.reset_generation`.
-- KEYS: fleet epochs
-- ARGV: none
-- Returns: its number, as text. Errors: GENERATION (no number is left).
-- USES: epochs generations

-- The number is never behind the clock: after a loss of memory, numbers that engines have seen must
-- not come again. A clock beyond the year 2112 is ignored.
local now_us = math.floor(server_s() * 1e6)
local number = math.max(generation() + 1, now_us < LAST_NUMBER / 2 and now_us or 0)
if number >= LAST_NUMBER then
  return redis.error_reply('GENERATION ' .. field_of(number) .. ' is greater than any may be')
end
keep_generation(number)
return field_of(number)
