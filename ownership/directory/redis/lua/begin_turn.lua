-- Make the epoch the worker that decodes the session. `SessionDirectory.begin_turn`.
-- KEYS: fleet epochs sessions session_uses groups group_ends
-- ARGV: epoch, session id, group or '', expected token or '', most sessions, session_ttl_s,
--       group_half_life_s, most groups
-- Returns: [1 if granted, else 0, msgpack session (lib/sessions.lua)]. Errors: STALE_EPOCH.
-- USES: clock epochs sessions

local epoch, id, group, expected = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local max_sessions, session_ttl_s = tonumber(ARGV[5]), tonumber(ARGV[6])
local half_life_s, max_groups = tonumber(ARGV[7]), tonumber(ARGV[8])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

expire_sessions(now_s - session_ttl_s)
local session = session_of(id)
local owner = session[S_OWNER]
local is_taken = owner ~= NO_EPOCH and owner ~= epoch and status_of(owner, now_s) == LIVE
if is_taken and expected ~= session[S_TOKEN] then
  return { 0, cmsgpack.pack(session) }
end
if owner ~= epoch then
  session[S_OWNER], session[S_TOKEN] = epoch, next_in_sequence()
end
if session[S_TURN_ENDED_S] then
  local think_s = session[S_THINK_S]
  table.insert(think_s, math.max(0, now_s - session[S_TURN_ENDED_S]))
  if #think_s > MAX_THINK_TIMES then
    table.remove(think_s, 1)
  end
  session[S_TURN_ENDED_S] = false
end
if group ~= '' then
  session[S_GROUP] = group
end
local packed = keep_session(id, session, now_s, max_sessions)
if session[S_GROUP] ~= '' then
  use_group(session[S_GROUP], nil, now_s, half_life_s, max_groups)
end
return { 1, packed }
