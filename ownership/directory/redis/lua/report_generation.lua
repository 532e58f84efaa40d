-- Record the generation in which a worker shares state; return the fleet's. `GenerationDirectory.report_generation`.
-- KEYS: fleet epochs adopted
-- ARGV: epoch, adopted, floor
-- Returns: the fleet's generation, as text. Errors: STALE_EPOCH, RETIRED_EPOCH.
-- USES: clock epochs generations
--
-- adopted: hash, epoch -> generation.

local epoch, floor = tonumber(ARGV[1]), tonumber(ARGV[3])
local refused = refusal(epoch, tick_s())
if refused then
  return refused
end
redis.call('HSET', adopted, field_of(epoch), ARGV[2])
if redis.call('HLEN', adopted) > redis.call('HLEN', epochs) then
  for _, field in ipairs(redis.call('HKEYS', adopted)) do
    if redis.call('HEXISTS', epochs, field) == 0 then
      redis.call('HDEL', adopted, field)
    end
  end
end
local number = generation()
if number < floor then
  keep_generation(number == 0 and floor or floor + 1)
end
return string.format('%.0f', generation())
