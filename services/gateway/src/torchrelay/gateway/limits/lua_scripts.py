"""The limiter's Lua scripts; each is one atomic round trip, by Redis's clock.

Per tenant there are two keys: a hash with the use of the tenant (fields ``t:...``) and of each of its keys
(``k:<key id>:...``), and a sorted set of the running requests by the end of their leases, whose members say what each
reserves. What is reserved and what runs are sums over that set, and are summed anew if Redis has evicted the hash.
Amounts are integers below 2**53 nano-dollars (nine million dollars), exact as Lua numbers.
"""

_COMMON = """
local use, leases = KEYS[1], KEYS[2]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local KEPT_S = 86400
local function whole(number) return string.format('%.0f', number + 0) end  -- never '-0'

local function change(member, sign, tokens_back)
  local key, requests, tokens, nano = string.match(member, '^%S+ (%S+) (%d+) (%d+) (%d+)$')
  for _, prefix in ipairs({'k:' .. key .. ':', 't:'}) do
    redis.call('HINCRBY', use, prefix .. 'running', whole(sign * requests))
    redis.call('HINCRBY', use, prefix .. 'reserved', whole(sign * nano))
    if tokens_back and redis.call('HEXISTS', use, prefix .. 'tokens') == 1 then
      redis.call('HINCRBYFLOAT', use, prefix .. 'tokens', whole(tokens - tokens_back))
    end
  end
  return key
end
"""

# Arguments: member, lease in seconds, key id, requests, tokens, amount, least amount, step; then of the key and of the
# tenant: requests and tokens per minute, requests at once, budget (each below 0: none), the begin of the budget's
# period, its spending (below 0: unknown), how long that holds, and the requests and tokens that the gateway has admitted
# without Redis since it was last told.
# Answer: outcome, place, seconds to wait, amount; then of both: requests and tokens left, running, reserved, spent.
ADMIT = (
    _COMMON
    + """
local member, lease_s, key_id = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local requests, tokens, amount = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local least, step = tonumber(ARGV[7]), tonumber(ARGV[8])

for _, late in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
  redis.call('ZREM', leases, late)
  change(late, -1, 0)
end
if redis.call('HEXISTS', use, 't:running') == 0 then
  redis.call('HSET', use, 't:running', 0)
  for _, running in ipairs(redis.call('ZRANGE', leases, 0, -1)) do change(running, 1) end
end

local function loaded(prefix, first)
  local s = {prefix = prefix, rpm = tonumber(ARGV[first]), tpm = tonumber(ARGV[first + 1]),
    most = tonumber(ARGV[first + 2]), budget = tonumber(ARGV[first + 3]), spent = -1}
  local names = {'at', 'requests', 'tokens', 'running', 'reserved', 'spent', 'period', 'until'}
  for i, name in ipairs(names) do names[i] = prefix .. name end
  local has = redis.call('HMGET', use, unpack(names))
  local elapsed = math.max(0, now - tonumber(has[1] or now))
  local function left(number, per_minute)
    if per_minute < 0 then return 0 end
    return math.min(per_minute, tonumber(number or per_minute) + elapsed * per_minute / 60)
  end
  s.requests, s.tokens = left(has[2], s.rpm), left(has[3], s.tpm)
  local owed_requests, owed_tokens = tonumber(ARGV[first + 7]), tonumber(ARGV[first + 8])
  if owed_requests > 0 or owed_tokens ~= 0 then
    s.requests, s.tokens = s.requests - owed_requests, s.tokens - owed_tokens
    redis.call('HSET', use, prefix .. 'at', string.format('%.6f', now), prefix .. 'requests',
      string.format('%.6f', s.requests), prefix .. 'tokens', string.format('%.6f', s.tokens))
  end
  local empty = redis.call('EXISTS', leases) == 0
  s.running = empty and 0 or math.max(0, tonumber(has[4] or 0))
  s.reserved = empty and 0 or math.max(0, tonumber(has[5] or 0))
  if s.budget >= 0 then
    local period, told = ARGV[first + 4], tonumber(ARGV[first + 5])
    if told >= 0 then
      s.spent = told
      redis.call('HSET', use, prefix .. 'spent', whole(told), prefix .. 'period', period, prefix .. 'until',
        string.format('%.6f', now + tonumber(ARGV[first + 6])))
    elseif has[6] and has[7] == period and now < tonumber(has[8]) then
      s.spent = tonumber(has[6])
    end
  end
  return s
end

local scopes = {loaded('k:' .. key_id .. ':', 9), loaded('t:', 18)}
local function answer(outcome, place, wait)
  local told = {outcome, whole(place - 1), string.format('%.6f', wait), whole(amount)}
  for _, s in ipairs(scopes) do
    for _, text in ipairs({string.format('%.6f', s.requests), string.format('%.6f', s.tokens), whole(s.running),
        whole(s.reserved), whole(s.spent)}) do
      table.insert(told, text)
    end
  end
  return told
end

for place, s in ipairs(scopes) do
  if s.budget >= 0 then
    if s.spent < 0 then return answer('spent?', place, 0) end
    local rest = s.budget - s.spent - least
    if step > 0 and s.spent + amount > s.budget and rest >= 0 then amount = least + rest - rest % step end
  end
end
for place, s in ipairs(scopes) do
  if s.budget >= 0 and s.spent + s.reserved + amount > s.budget then return answer('budget', place, 0) end
  if s.most >= 0 and s.running + requests > s.most then return answer('running', place, 0) end
  if s.rpm >= 0 and s.requests < requests then
    return answer('requests', place, (requests - s.requests) * 60 / s.rpm)
  end
  if s.tpm >= 0 and s.tokens < tokens then return answer('tokens', place, (tokens - s.tokens) * 60 / s.tpm) end
end

local told = answer('ok', 1, 0)
if member ~= '' then
  for _, s in ipairs(scopes) do
    redis.call('HSET', use, s.prefix .. 'at', string.format('%.6f', now), s.prefix .. 'running', whole(s.running),
      s.prefix .. 'reserved', whole(s.reserved))
    if s.rpm >= 0 then redis.call('HSET', use, s.prefix .. 'requests', string.format('%.6f', s.requests - requests)) end
    if s.tpm >= 0 then redis.call('HSET', use, s.prefix .. 'tokens', string.format('%.6f', s.tokens - tokens)) end
  end
  member = member .. ' ' .. whole(amount)
  redis.call('ZADD', leases, now + lease_s, member)
  change(member, 1)
  redis.call('EXPIRE', leases, KEPT_S)
end
redis.call('EXPIRE', use, KEPT_S)
return told
"""
)

# Arguments: lease in seconds, members. A request that Redis does not know any more stays unknown.
RENEW = (
    _COMMON
    + """
for i = 2, #ARGV do redis.call('ZADD', leases, 'XX', now + tonumber(ARGV[1]), ARGV[i]) end
return {'ok'}
"""
)

# Arguments: member, cost, tokens used. Idempotent, since it is repeated when its answer was lost. The cost of a
# reservation that Redis does not know, because its lease is over or it was never stored, comes with the next copy of
# the spending.
RELEASE = (
    _COMMON
    + """
if redis.call('ZREM', leases, ARGV[1]) == 1 then
  local key = change(ARGV[1], -1, tonumber(ARGV[3]))
  for _, prefix in ipairs({'k:' .. key .. ':', 't:'}) do
    if redis.call('HEXISTS', use, prefix .. 'spent') == 1 then
      redis.call('HINCRBY', use, prefix .. 'spent', ARGV[2])
    end
  end
end
return {'ok'}
"""
)
