-- A new generation, greater than any before. `GenerationDirectory.reset_generation`.
-- KEYS: fleet epochs
-- ARGV: none
-- Returns: its number, as text.
-- USES: epochs generations

-- Never behind the clock: after a loss of memory the numbers that engines have had already must not
-- come again. A clock beyond the year 2112 is not followed.
local now_us = math.floor(server_s() * 1e6)
keep_generation(math.max(generation() + 1, now_us < LAST_NUMBER / 2 and now_us or 0))
return string.format('%.0f', generation())
