"""Writes a configuration that means the same as a run of TRL or of verl. `trl` and `verl` have a table of keys each, and read what a run
says; nothing of it is executed. `draft` collects what becomes of each key, and writes the file."""
