-- Sessions and hot groups, by the rules of `sessions.py`. Needs: fleet, epochs,
-- sessions, session_uses, groups, group_ends.
--
-- sessions: hash, id -> msgpack [token, decode owner, boundary, boundary_tokens, group,
-- [think_s, ...], turn_ended_s or false, used_s]. session_uses: sorted set, id by a count of
-- uses. groups: sorted set, name by the log2 of its forward-decayed uses. group_ends: hash,
-- name -> chain ends, 16 bytes each.

local S_TOKEN, S_OWNER, S_BOUNDARY, S_BOUNDARY_TOKENS = 1, 2, 3, 4
local S_GROUP, S_THINK_S, S_TURN_ENDED_S, S_USED_S = 5, 6, 7, 8
local MAX_THINK_TIMES, MAX_CHAIN_ENDS = 16, 8
local NO_BOUNDARY = string.rep('\0', 16)

-- A session that cannot be decoded is unknown.
local function session_of(id)
  local is_read, found = pcall(cmsgpack.unpack, redis.call('HGET', sessions, id) or '')
  if is_read and type(found) == 'table' and type(found[S_TOKEN]) == 'number'
    and type(found[S_OWNER]) == 'number' and type(found[S_GROUP]) == 'string'
    and type(found[S_THINK_S]) == 'table' and type(found[S_USED_S]) == 'number'
    and (not found[S_TURN_ENDED_S] or type(found[S_TURN_ENDED_S]) == 'number') then
    return found
  end
  return { 0, NO_EPOCH, NO_BOUNDARY, 0, '', {}, false, 0 }
end

local function forget_session(id)
  redis.call('HDEL', sessions, id)
  redis.call('ZREM', session_uses, id)
end

local function keep_session(id, session, now_s, max_sessions)
  session[S_USED_S] = now_s
  local packed = cmsgpack.pack(session)
  redis.call('HSET', sessions, id, packed)
  redis.call('ZADD', session_uses, redis.call('HINCRBY', fleet, 'session_uses', 1), id)
  if redis.call('ZCARD', session_uses) > max_sessions then
    forget_session(redis.call('ZRANGE', session_uses, 0, 0)[1])
  end
  return packed
end

-- Forget sessions last used at or before `oldest_s`.
local function expire_sessions(oldest_s)
  while true do
    local first = redis.call('ZRANGE', session_uses, 0, 0)[1]
    if not first or session_of(first)[S_USED_S] > oldest_s then
      return
    end
    forget_session(first)
  end
end

local function log2(number)
  return math.log(number) / math.log(2)
end

-- Record one use of a group; `chain_end` is nil if it is not known yet. See
-- `sessions.log_heat_after_use`.
local function use_group(group, chain_end, now_s, half_life_s, max_groups)
  local use = now_s / half_life_s
  local known = tonumber(redis.call('ZSCORE', groups, group) or nil)
  if known then
    local high, low = math.max(use, known), math.min(use, known)
    use = high + log2(1 + 2 ^ math.max(low - high, -1000))
  end
  redis.call('ZADD', groups, exact(use), group)
  if chain_end then
    local ends = redis.call('HGET', group_ends, group) or ''
    local kept = {}
    for from = 1, #ends, 16 do
      local known_end = string.sub(ends, from, from + 15)
      if known_end ~= chain_end then
        table.insert(kept, known_end)
      end
    end
    table.insert(kept, chain_end)
    local first = math.max(1, #kept - MAX_CHAIN_ENDS + 1)
    redis.call('HSET', group_ends, group, table.concat(kept, '', first))
  end
  if redis.call('ZCARD', groups) > max_groups then
    local coldest = redis.call('ZRANGE', groups, 0, 1)
    local dropped = coldest[1] == group and coldest[2] or coldest[1]
    redis.call('ZREM', groups, dropped)
    redis.call('HDEL', group_ends, dropped)
  end
end
