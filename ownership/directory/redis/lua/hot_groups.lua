-- Return the hottest groups, hottest first. `SessionDirectory.hot_groups`.
-- KEYS: fleet groups group_ends
-- ARGV: number of groups
-- Returns: [now_s as text, name, log2 of its heat as text, chain ends (16 bytes each), ...].
-- USES: clock

local answers = { exact(tick_s()) }
local hottest = redis.call('ZREVRANGE', groups, 0, tonumber(ARGV[1]) - 1, 'WITHSCORES')
for index = 1, #hottest, 2 do
  table.insert(answers, hottest[index])
  table.insert(answers, hottest[index + 1])
  table.insert(answers, redis.call('HGET', group_ends, hottest[index]) or '')
end
return answers
