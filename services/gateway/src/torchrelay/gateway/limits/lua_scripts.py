"""The limiter's Lua scripts; each is one atomic round trip.

Keys: the API key's bucket; per tenant: amount spent, total reserved, amount per reservation, lease ends. Amounts are
integers below 2**53 nano-dollars (nine million dollars), exact as Lua numbers.
"""

# An amount above the unspent budget is reduced in steps, to no less than the least; a step of 0 forbids that. The
# reservations of other requests do not reduce it, because they are returned.
ADMIT = """
local bucket, spent_key, reserved_key, amounts, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now, per_minute, budget = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local id, amount, lease_s = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local spent_now, spent_ttl_s = tonumber(ARGV[7]), tonumber(ARGV[8])
local least, step = tonumber(ARGV[9]), tonumber(ARGV[10])

if budget >= 0 then
  if spent_now >= 0 then
    redis.call('SET', spent_key, string.format('%.0f', spent_now), 'EX', spent_ttl_s)
  end
  local spent = tonumber(redis.call('GET', spent_key))
  if not spent then return {'spent?'} end
  for _, late in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do
    redis.call('DECRBY', reserved_key, redis.call('HGET', amounts, late) or 0)
    redis.call('HDEL', amounts, late)
    redis.call('ZREM', leases, late)
  end
  local rest = budget - spent - least
  if step > 0 and spent + amount > budget and rest >= 0 then amount = least + rest - rest % step end
  local reserved = math.max(0, tonumber(redis.call('GET', reserved_key) or 0))  -- below: the key was evicted
  if spent + reserved + amount > budget then
    return {'budget', string.format('%.0f', spent), string.format('%.0f', reserved)}
  end
end

local left = ''
if per_minute > 0 then
  local state = redis.call('HMGET', bucket, 'tokens', 'at')
  local tokens, at = tonumber(state[1] or per_minute), tonumber(state[2] or now)
  tokens = math.min(per_minute, tokens + math.max(0, now - at) * per_minute / 60)
  local enough = tokens >= 1
  if enough then tokens = tokens - 1 end
  redis.call('HSET', bucket, 'tokens', tostring(tokens), 'at', string.format('%.6f', math.max(now, at)))
  redis.call('EXPIRE', bucket, 120)
  left = tostring(tokens)
  if not enough then return {'rate', tostring((1 - tokens) * 60 / per_minute), left} end
end

if budget >= 0 and amount > 0 then
  redis.call('HSET', amounts, id, string.format('%.0f', amount))
  redis.call('ZADD', leases, now + lease_s, id)
  redis.call('INCRBY', reserved_key, string.format('%.0f', amount))
end
return {'ok', string.format('%.0f', amount), left}
"""

RENEW = """
local amounts, leases = KEYS[1], KEYS[2]
if redis.call('HEXISTS', amounts, ARGV[1]) == 1 then redis.call('ZADD', leases, ARGV[2], ARGV[1]) end
return {'ok'}
"""

# Idempotent, since it is repeated when its answer was lost. The cost of a reservation that Redis does not know, because
# its lease is over or it was never stored, comes with the next copy of the spending.
RELEASE = """
local spent_key, reserved_key, amounts, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, cost = ARGV[1], ARGV[2]
local amount = redis.call('HGET', amounts, id)
if amount then
  redis.call('DECRBY', reserved_key, amount)
  redis.call('HDEL', amounts, id)
  redis.call('ZREM', leases, id)
  if redis.call('EXISTS', spent_key) == 1 then redis.call('INCRBY', spent_key, cost) end
end
return {'ok'}
"""
