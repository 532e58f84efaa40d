-- The fleet's generation. Needs: fleet.
--
-- fleet.generation: a number that only grows; absent before any reset, and after a loss of memory.

local function generation()
  return tonumber(redis.call('HGET', fleet, 'generation') or 0)
end

local function keep_generation(number)
  redis.call('HSET', fleet, 'generation', string.format('%.0f', number))
end
