"""The page of runs: one web server for all runs of a folder, live or dead, which reads their files alone."""
