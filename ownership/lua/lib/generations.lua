-- The fleet's generation. Needs: fleet, epochs.lua (for numbers).
--
-- fleet.generation: a number that only grows; absent before any reset, and after a loss of memory.

local function generation()
  local number = tonumber(redis.call('HGET', fleet, 'generation') or nil)
  local is_one = number and number >= 0 and number < LAST_NUMBER and number == math.floor(number)
  return is_one and number or 0
end

local function keep_generation(number)
  redis.call('HSET', fleet, 'generation', string.format('%.0f', number))
end
