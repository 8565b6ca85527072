-- The fields of a group's hash for each of its trajectories: `<letter><index>` (see _group.lua).

-- Their names for n trajectories: all for the first of `letters`, then all for the next. The lists are cached and must not be changed.
local NAMES = {}

local function field_names(letters, n)
  local by_count = NAMES[letters] or {}
  NAMES[letters] = by_count
  if not by_count[n] then
    local names = {}
    for letter in string.gmatch(letters, '.') do
      for i = 0, n - 1 do names[#names + 1] = letter .. i end
    end
    by_count[n] = names
  end
  return by_count[n]
end

local function field_names_of(group, letters)
  return field_names(letters, group.count or group.n)
end
