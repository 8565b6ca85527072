-- A trajectory in its group's hash. Its values are text whose parts stand in a fixed order; only this file reads and writes them.
--
--   p<i>  pushed: `<nonce> <length> <oldest> <newest> <ms from lease to push>`
--   q<i>  saved, unfinished: `<nonce> <length> <oldest> <newest>`. Of an episode the second part is the bytes of its calls
--   w<i>  with the scorer: `<scoring attempts> <token>`; no token: it waits
--   a<i>  of an episode: `<times begun> <failures> <interruptions>`
--
-- oldest and newest are weight versions. Its payload and its score are values of their own, named after the nonce.

-- The key of its payload: of an episode that is not finished, the list of its calls.
local function payload_key(run, nonce) return run.base .. 'p:' .. nonce end

-- The key under which a caller stages a payload: in the incarnation that it knows, which may have ended.
local function staged_key(run, incarnation, nonce) return run.key .. ':' .. incarnation .. ':p:' .. nonce end

local function score_key(run, nonce) return run.base .. 's:' .. nonce end

-- The parts of p<i> and q<i>. Both readers return nothing for nil or false.
local function nonce_of(stored) return string.match(stored or '', '^%S+') end

local function extent_of(stored)
  local nonce, length, oldest, newest = string.match(stored or '', '^(%S+) (%d+) (%d+) (%d+)')
  return nonce, tonumber(length), tonumber(oldest), tonumber(newest)
end

local function latency_of(pushed) return tonumber(string.match(pushed, '^%S+ %d+ %d+ %d+ (%d+)$')) end

-- Lua formats numbers slowly, so a caller has `parts` ready: length, oldest and newest as text.
local function saved_value(nonce, parts) return nonce .. ' ' .. parts end

local function pushed_value(nonce, parts, latency) return nonce .. ' ' .. parts .. ' ' .. latency end

-- The parts of w<i>: attempts, and the token of the scorer that has it, or nil. A trajectory that no scorer ever had has no w<i>.
local function scoring_of(stored)
  local attempts, token = string.match(stored or '', '^(%d+) (.*)$')
  return tonumber(attempts or 0), token ~= '' and token or nil
end

local function scoring_value(attempts, token) return attempts .. ' ' .. (token or '') end

-- The parts of a<i>.
local function tries_of(stored)
  local begun, failures, interrupted = string.match(stored or '0 0 0', '^(%d+) (%d+) (%d+)$')
  return tonumber(begun), tonumber(failures), tonumber(interrupted)
end

local function tries_value(begun, failures, interrupted) return string.format('%d %d %d', begun, failures, interrupted) end
