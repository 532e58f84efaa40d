-- A new generation, greater than any before. `GenerationDirectory.reset_generation`.
-- KEYS: fleet
-- ARGV: none
-- Returns: its number, as text.
-- USES: generations

-- Never behind the clock: after a loss of memory the numbers that engines have had already must not
-- come again.
keep_generation(math.max(generation() + 1, math.floor(server_s() * 1e6)))
return string.format('%.0f', generation())
