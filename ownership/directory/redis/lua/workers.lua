-- Return all live workers, with what is needed to read from them. `OwnershipDirectory.workers`.
-- KEYS: fleet epochs peers
-- ARGV: none
-- Returns: [epoch, name, storage, peer metadata, ...].
-- USES: clock epochs

local now_s = tick_s()
local live = {}
for _, epoch in ipairs(known_epochs()) do
  if status_of(epoch, now_s) == LIVE then
    local entry, field = entry_of(epoch), field_of(epoch)
    table.insert(live, field)
    table.insert(live, entry[NAME])
    table.insert(live, entry[STORAGE])
    table.insert(live, redis.call('HGET', peers, field) or '')
  end
end
return live
