-- Arguments: parsed before anything is read or written, so that a malformed call changes nothing.

-- Raised by `refuse`, caught by `register`: a typed error for the caller, counted in the run.
local function refuse(code, message)
  error({code = code, message = message}, 0)
end

-- What was found, fit for a one-line error.
local function show(text)
  local clean = string.gsub(tostring(text), '[%c"]', '?')
  if #clean > 80 then clean = string.sub(clean, 1, 77) .. '...' end
  return '"' .. clean .. '"'
end

-- Written in one way only, without leading zeros: what a number becomes part of is a name.
local function natural(text, what)
  if type(text) ~= 'string' or #text > 15 or not string.find(text, '^%d+$') or (#text > 1 and string.byte(text) == 48) then
    refuse('HR_INVALID', what .. ' is ' .. show(text) .. ', not a whole number of at least 0')
  end
  return tonumber(text)
end

local function positive(text, what)
  local number = natural(text, what)
  if number == 0 then refuse('HR_INVALID', what .. ' is 0, not a whole number of at least 1') end
  return number
end

-- A finite number; nan and inf are not.
local function finite(text, what)
  local number = tonumber(text)
  if not number or number ~= number or number == math.huge or number == -math.huge then
    refuse('HR_INVALID', what .. ' is ' .. show(text) .. ', not a finite number')
  end
  return number
end

local NAME = '[%w._:@/+=,~-]+'

-- Ids and nonces: they become parts of keys, members and lines of lists.
local function name(text, what)
  if type(text) ~= 'string' or #text > 256 or not string.find(text, '^' .. NAME .. '$') then
    refuse('HR_INVALID', what .. ' is ' .. show(text) .. ', not 1 to 256 letters, digits and ._:@/+=,~-')
  end
  return text
end

local function choice(text, allowed, what)
  if not allowed[text] then refuse('HR_INVALID', what .. ' is ' .. show(text)) end
  return text
end

-- Words of people and programs, kept short.
local function words(text)
  return string.sub(text, 1, 2000)
end

-- Number of entries of `width` arguments each after the first `fixed`; at most `most` of them.
local function entries(args, fixed, width, most)
  local count = (#args - fixed) / width
  if #args < fixed or count ~= math.floor(count) or count > most then
    refuse('HR_INVALID', #args .. ' arguments, not ' .. fixed .. ' and up to ' .. most .. ' times ' .. width)
  end
  return count
end

-- Sort the entries of a batch by group, in the order they came.
local function group_entry(groups, by_id, entry)
  local of_group = by_id[entry.id]
  if not of_group then
    of_group = {}
    by_id[entry.id], groups[#groups + 1] = of_group, of_group
  end
  of_group[#of_group + 1] = entry
end

local LANES = {train = true, validation = true}
-- Entries in one call of a batched function: bounds the time any call holds the server.
local BATCH = 256
