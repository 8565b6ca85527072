-- For `make style`, which checks the buffer's files joined, as a server gets them (scripts/check_lua.py).
stds.redis = {
  -- what Redis and Valkey give to a function, without what none of these should use (redis.setresp, os, loadstring, …)
  read_globals = {
    'cmsgpack', 'error', 'ipairs', 'next', 'pairs', 'pcall', 'select', 'tonumber', 'tostring', 'type', 'unpack',
    redis = {fields = {'acl_check_cmd', 'call', 'error_reply', 'register_function', 'sha1hex'}},
    math = {fields = {'abs', 'ceil', 'floor', 'huge', 'log', 'max', 'min'}},
    string = {fields = {'byte', 'char', 'find', 'format', 'gmatch', 'gsub', 'lower', 'match', 'sub', 'upper'}},
    table = {fields = {'concat', 'insert', 'remove', 'sort'}},
  },
}
std = 'redis'
max_line_length = 140
