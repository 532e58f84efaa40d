-- The fleet's generation. Needs: fleet, epochs.lua (for numbers).
--
-- fleet.generation: a number that only grows; absent before any reset, and after a loss of memory.

local function generation()
  return number_in(redis.call('HGET', fleet, 'generation')) or 0
end

local function keep_generation(number)
  redis.call('HSET', fleet, 'generation', string.format('%.0f', number))
end
