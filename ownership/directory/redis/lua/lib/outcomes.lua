-- Answers to claims and replicas: [outcome, owner, token, ...].

local OWNED, FOREIGN, REPLICA, ABSENT, FULL = 0, 1, 2, 3, 4
local NO_TOKEN = 0

local answers = {}

local function answer(outcome, owner, token)
  local at = #answers
  answers[at + 1], answers[at + 2], answers[at + 3] = outcome, owner, token
end
