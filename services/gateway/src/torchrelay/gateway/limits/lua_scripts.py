"""The limiter's Lua scripts; each is one atomic round trip, by Redis's clock.

Per tenant there are two keys: a hash with the use of the tenant (fields ``t:...``) and of each of its keys
(``k:<key id>:...``), and the reservation of each running request (``r:<id>``); and a sorted set of these requests by
the end of their leases, whose members say what each reserves. Either may be evicted: each has a mark, and without one
of the two marks all sums are made anew from the set.
Amounts are integers below 2**53 nano-dollars (nine million dollars), exact as Lua numbers.
"""

_COMMON = """
local use, leases = KEYS[1], KEYS[2]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local KEPT_S, MOST_FIELDS, MARK = 86400, 32000, 'mark'
local function whole(number) return string.format('%.0f', number + 0) end  -- never '-0'

local function change(member, sign, tokens_back)
  local id, key, tokens, nano = string.match(member, '^(%S+) (%S+) (%d+) (%d+)$')
  if not id then return end
  for _, prefix in ipairs({'k:' .. key .. ':', 't:'}) do
    redis.call('HINCRBY', use, prefix .. 'running', sign)
    redis.call('HINCRBY', use, prefix .. 'reserved', whole(sign * nano))
    if tokens_back and redis.call('HEXISTS', use, prefix .. 'tokens') == 1 then
      redis.call('HINCRBYFLOAT', use, prefix .. 'tokens', whole(tokens - tokens_back))
    end
  end
  if sign > 0 then redis.call('HSET', use, 'r:' .. id, member) else redis.call('HDEL', use, 'r:' .. id) end
  return key
end

-- Makes the sums anew, and forgets the keys that have not been used for an hour.
local function rebuild()
  local fields = redis.call('HGETALL', use)
  local last = {}
  for i = 1, #fields, 2 do
    local key = string.match(fields[i], '^(k:.+:)at$')
    if key then last[key] = tonumber(fields[i + 1]) end
  end
  for i = 1, #fields, 2 do
    local field = fields[i]
    local key = string.match(field, '^(k:.+:)%a+$')
    local is_old = key and now - (last[key] or 0) > 3600
    local is_sum = string.match(field, '^r:') or string.match(field, ':running$') or string.match(field, ':reserved$')
    if is_old or is_sum then redis.call('HDEL', use, field) end
  end
  for _, running in ipairs(redis.call('ZRANGE', leases, 0, -1)) do change(running, 1) end
  redis.call('HSET', use, MARK, whole(now))
  redis.call('ZADD', leases, 'inf', MARK)
end

local marked = redis.call('HGET', use, MARK)
if not marked or not redis.call('ZSCORE', leases, MARK) then
  rebuild()
elseif redis.call('HLEN', use) > MOST_FIELDS and now - marked > 60 then
  rebuild()
end
redis.call('EXPIRE', use, KEPT_S)
redis.call('EXPIRE', leases, KEPT_S)
"""

# Arguments: id (empty: nothing is reserved), lease in seconds, key id, requests, tokens, amount, least amount, step;
# then of the key and of the tenant: requests and tokens per minute, requests at once, budget (each below 0: none), the
# begin of the budget's period, its spending (below 0: unknown), how long that holds, and the requests and tokens that
# the gateway has admitted without Redis and that have ended since it was last told; then of each such request that
# runs: id, key id, requests, tokens, amount.
# Answer: outcome, place, seconds to wait, amount; then of both: requests and tokens left, running, reserved, spent.
# Idempotent: a client repeats it after a connection broke.
ADMIT = (
    _COMMON
    + """
local id, lease_s, key_id = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local requests, tokens, amount = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local least, step = tonumber(ARGV[7]), tonumber(ARGV[8])

local own, all = {requests = 0, tokens = 0}, {requests = 0, tokens = 0}  -- of this key, and of the tenant
for i = 27, #ARGV, 5 do
  if redis.call('HEXISTS', use, 'r:' .. ARGV[i]) == 0 then
    for name, taken in pairs({requests = tonumber(ARGV[i + 2]), tokens = tonumber(ARGV[i + 3])}) do
      local field = 'k:' .. ARGV[i + 1] .. ':' .. name
      all[name] = all[name] + taken
      if ARGV[i + 1] == key_id then
        own[name] = own[name] + taken
      elseif redis.call('HEXISTS', use, field) == 1 then
        redis.call('HINCRBYFLOAT', use, field, whole(-taken))
      end
    end
    local member = table.concat({ARGV[i], ARGV[i + 1], ARGV[i + 3], ARGV[i + 4]}, ' ')
    redis.call('ZADD', leases, now + lease_s, member)
    change(member, 1)
  end
end
for _, late in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
  redis.call('ZREM', leases, late)
  change(late, -1, 0)
end

local function loaded(prefix, first, running)
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
  local owed_requests = tonumber(ARGV[first + 7]) + running.requests
  local owed_tokens = tonumber(ARGV[first + 8]) + running.tokens
  if owed_requests > 0 or owed_tokens ~= 0 then
    -- A debt of at most ten seconds: a long absence of Redis must not lock a key out.
    s.requests = math.max(math.min(s.requests, -s.rpm / 6), s.requests - owed_requests)
    s.tokens = math.max(math.min(s.tokens, -s.tpm / 6), s.tokens - owed_tokens)
    redis.call('HSET', use, prefix .. 'at', string.format('%.6f', now), prefix .. 'requests',
      string.format('%.6f', s.requests), prefix .. 'tokens', string.format('%.6f', s.tokens))
  end
  s.running, s.reserved = math.max(0, tonumber(has[4] or 0)), math.max(0, tonumber(has[5] or 0))
  if s.budget >= 0 then
    local period, told = ARGV[first + 4], tonumber(ARGV[first + 5])
    if told >= 0 then
      s.spent = told
      redis.call('HSET', use, prefix .. 'spent', whole(told), prefix .. 'period', period, prefix .. 'until',
        string.format('%.6f', now + tonumber(ARGV[first + 6])))
    elseif has[6] and has[7] == period and now < tonumber(has[8]) then
      s.spent = math.max(0, tonumber(has[6]))
    end
  end
  return s
end

local scopes = {loaded('k:' .. key_id .. ':', 9, own), loaded('t:', 18, all)}
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

local earlier = id ~= '' and redis.call('HGET', use, 'r:' .. id)
if earlier then
  amount = tonumber(string.match(earlier, '(%d+)$'))
  return answer('ok', 1, 0)
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
  if id ~= '' and s.most >= 0 and s.running + 1 > s.most then return answer('running', place, 0) end
  if s.rpm >= 0 and s.requests < requests then
    return answer('requests', place, (requests - s.requests) * 60 / s.rpm)
  end
  local needed = math.min(tokens, s.tpm)
  if s.tpm >= 0 and s.tokens < needed then return answer('tokens', place, (needed - s.tokens) * 60 / s.tpm) end
end

local told = answer('ok', 1, 0)
if id ~= '' then
  for _, s in ipairs(scopes) do
    redis.call('HSET', use, s.prefix .. 'at', string.format('%.6f', now), s.prefix .. 'running', whole(s.running),
      s.prefix .. 'reserved', whole(s.reserved))
    if s.rpm >= 0 then redis.call('HSET', use, s.prefix .. 'requests', string.format('%.6f', s.requests - requests)) end
    if s.tpm >= 0 then redis.call('HSET', use, s.prefix .. 'tokens', string.format('%.6f', s.tokens - tokens)) end
  end
  local member = table.concat({id, key_id, whole(tokens), whole(amount)}, ' ')
  redis.call('ZADD', leases, now + lease_s, member)
  change(member, 1)
end
return told
"""
)

# Arguments: lease in seconds, ids. Answer: the ids of requests that Redis does not know any more.
RENEW = (
    _COMMON
    + """
local unknown = {}
for i = 2, #ARGV do
  local member = redis.call('HGET', use, 'r:' .. ARGV[i])
  if member then
    redis.call('ZADD', leases, 'XX', now + tonumber(ARGV[1]), member)
  else
    table.insert(unknown, ARGV[i])
  end
end
return unknown
"""
)

# Arguments: id, cost, tokens used. Idempotent, since it is repeated when its answer was lost. The cost of a
# reservation that Redis does not know, because its lease is over or it was never stored, comes with the next copy of
# the spending. Answer: whether Redis knew the request.
RELEASE = (
    _COMMON
    + """
local member = redis.call('HGET', use, 'r:' .. ARGV[1])
if member and redis.call('ZREM', leases, member) == 1 then
  local key = change(member, -1, tonumber(ARGV[3]))
  for _, prefix in ipairs({'k:' .. key .. ':', 't:'}) do
    if redis.call('HEXISTS', use, prefix .. 'spent') == 1 then
      redis.call('HINCRBY', use, prefix .. 'spent', ARGV[2])
    end
  end
  return {'ok', '1'}
end
return {'ok', '0'}
"""
)
