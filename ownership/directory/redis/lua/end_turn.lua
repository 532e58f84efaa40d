-- Record the boundary at which the session can resume. `SessionDirectory.end_turn`.
-- KEYS: fleet epochs sessions session_uses
-- ARGV: epoch, session id, token, boundary (a chunk key), boundary_tokens, most sessions
-- Returns: [1 if granted, else 0, msgpack session (lib/sessions.lua)]. Errors: STALE_EPOCH.
-- USES: clock epochs sessions

local epoch, id, token = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local boundary, boundary_tokens, max_sessions = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local now_s = tick_s()
local refused = refusal(epoch, now_s)
if refused then
  return refused
end

local session = session_of(id)
if session[S_OWNER] ~= epoch or session[S_TOKEN] ~= token then
  return { 0, cmsgpack.pack(session) }
end
session[S_BOUNDARY], session[S_BOUNDARY_TOKENS] = boundary, boundary_tokens
session[S_TURN_ENDED_S] = now_s
return { 1, keep_session(id, session, now_s, max_sessions) }
