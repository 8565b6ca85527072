-- Arguments, parsed before anything is read or written, so that a malformed call changes nothing.
--
-- ARGV[1] of a function is a msgpack map of the arguments in its header. A function whose header lists none takes none. Bytes (payloads,
-- records) follow as separate arguments, one for each entry that they belong to, in the same order.

-- A typed error for the caller, counted in the run: raised by `refuse`, caught by `register`.
local function refuse(code, message)
  error({code = code, message = message}, 0)
end

-- Format a value for a one-line error.
local function show(value)
  local clean = string.gsub(tostring(value), '[%c"]', '?')
  if #clean > 80 then clean = string.sub(clean, 1, 77) .. '...' end
  return '"' .. clean .. '"'
end

-- Parsers: each takes a value and its name, and returns the value or refuses the call.

-- Fewer than 15 digits, because numbers become parts of names: Lua writes longer ones with an exponent, and -0 with its sign.
local function natural(value, what)
  if type(value) ~= 'number' or value < 0 or 1 / value < 0 or value >= 1e14 or value ~= math.floor(value) then
    refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not a whole number of at least 0')
  end
  return value
end

-- -1 means none.
local function natural_or_none(value, what)
  return value == -1 and -1 or natural(value, what)
end

local function positive(value, what)
  if natural(value, what) == 0 then refuse('HR_INVALID', what .. ' is 0, not a whole number of at least 1') end
  return value
end

-- A finite number; nan and inf are not.
local function finite(value, what)
  if type(value) ~= 'number' or value ~= value or value == math.huge or value == -math.huge then
    refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not a finite number')
  end
  return value
end

-- Ids and nonces, which become parts of keys, members and lines of lists.
local function name(value, what)
  if type(value) ~= 'string' or #value > 256 or not string.find(value, '^[%w._:@/+=,~-]+$') then
    refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not 1 to 256 letters, digits and ._:@/+=,~-')
  end
  return value
end

-- UTF-8 sequences of more than one byte, by RFC 3629. (While a library loads there are no iterators.)
local UTF_8 = {
  '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]', '\237[\128-\159][\128-\191]',
  '\240[\144-\191][\128-\191][\128-\191]', '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]',
}

-- Text must be UTF-8: readers of replies and events could not decode anything else.
local function is_utf_8(value)
  for i = 1, string.find(value, '[\128-\255]') and #UTF_8 or 0 do value = string.gsub(value, UTF_8[i], '?') end
  return not string.find(value, '[\128-\255]')
end

local function text(value, what)
  if type(value) ~= 'string' then refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not text') end
  if not is_utf_8(value) then refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not UTF-8') end
  return value
end

local function flag(value, what)
  if type(value) ~= 'boolean' then refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', neither true nor false') end
  return value
end

local function one_of(allowed)
  return function(value, what)
    for i = 1, #allowed do
      if value == allowed[i] then return value end
    end
    refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not one of ' .. table.concat(allowed, ', '))
  end
end

local function entries_of(value)
  local count = 0
  for _ in pairs(value) do count = count + 1 end
  return count
end

-- A list of at most `most` entries, each of which `parse` accepts.
local function list_of(parse, most)
  return function(value, what)
    -- `#` does not see an entry behind a hole (nil) or under a map's key: then it is not a list
    if type(value) ~= 'table' or #value > most or entries_of(value) ~= #value then
      refuse('HR_INVALID', what .. ' is not a list of up to ' .. most)
    end
    for i = 1, #value do parse(value[i], what) end
    return value
  end
end

-- A map. The caller parses its fields.
local function map(value, what)
  if type(value) ~= 'table' then refuse('HR_INVALID', 'an entry of ' .. what .. ' is ' .. show(value) .. ', not a map') end
  return value
end

-- The named arguments, parsed by `spec` (name -> parser).
local function named(spec, packed)
  local ok, given = pcall(cmsgpack.unpack, packed)
  if not ok or type(given) ~= 'table' then refuse('HR_INVALID', 'the arguments ' .. show(packed) .. ' are not a msgpack map') end
  for argument in pairs(given) do
    if not spec[argument] then refuse('HR_INVALID', 'unknown argument ' .. show(argument)) end
  end
  local parsed = {}
  for argument, parse in pairs(spec) do
    if given[argument] == nil then refuse('HR_INVALID', 'the argument ' .. argument .. ' is missing') end
    parsed[argument] = parse(given[argument], argument)
  end
  return parsed
end

local function require_bytes(count, args)
  if #args - 1 ~= count then refuse('HR_INVALID', #args - 1 .. ' arguments of bytes, not ' .. count) end
end

-- For replies: msgpack can't distinguish an empty map from an empty list, so an empty map is left out.
local function unless_empty(value)
  if next(value) ~= nil then return value end
end

-- Text from people and programs, shortened to `most` bytes (2,000). A character that would be cut in two is dropped.
local function words(value, most)
  most = most or 2000
  if #value <= most then return value end
  return (string.gsub(string.sub(value, 1, most), '[\192-\255][\128-\191]*$', ''))
end

-- Turn a hash's fields and values into a map of numbers.
local function numbers(flat)
  local by_name = {}
  for i = 1, #flat, 2 do by_name[flat[i]] = tonumber(flat[i + 1]) end
  return by_name
end

-- Group the entries of a batch by their group, in the order in which they came.
local function group_entry(groups, by_id, entry)
  local of_group = by_id[entry.id]
  if not of_group then
    of_group = {}
    by_id[entry.id], groups[#groups + 1] = of_group, of_group
  end
  of_group[#of_group + 1] = entry
end

-- The most entries in one call of a batched function. It bounds the time for which a call occupies the server.
local BATCH = 256
